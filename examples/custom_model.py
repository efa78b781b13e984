"""Train a custom nn.Module: any model that returns logits and processes each image independently."""

import torch
from torch import Tensor, nn

import dpcert

RECORDS, EPOCHS = 1000, 5


class Residual(nn.Module):
    """A small residual network. It uses GroupNorm, because BatchNorm would mix the records of a batch."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 8, 5, stride=3)
        self.block = nn.Sequential(nn.GroupNorm(2, 8), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(8 * 4 * 4, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [batch, classes]."""
        features = self.stem(x)
        features = torch.tanh(features + self.block(features))
        return self.head(features)


def residual(input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The factory. On the command line: --model custom_model:residual."""
    return Residual(input_shape[0], classes)


def main() -> None:
    """Train, certify, predict, report."""
    mnist = dpcert.load_dataset("mnist")
    data = dpcert.Dataset(
        x_train=mnist.x_train[:RECORDS], y_train=mnist.y_train[:RECORDS], x_test=mnist.x_test, y_test=mnist.y_test, classes=10
    )
    model = residual(data.input_shape, classes=10)
    trained = dpcert.train(
        model, data, "dp-gaussian", epsilon=8.0, delta=1e-4, epochs=EPOCHS, batch_size=100, out="runs/custom-model"
    )
    print(trained.statement)

    run = dpcert.open_run("runs/custom-model", model=residual, data=data)
    certificates = run.certify(examples=10, n=1000)
    print(f"average certified radius {certificates.acr:.3f}, {certificates.abstained} of 10 abstained")
    print("predictions:", run.predict(data.x_test[:5], n=1000).tolist(), "labels:", data.y_test[:5].tolist())
    print("report:", run.report())


if __name__ == "__main__":
    main()
