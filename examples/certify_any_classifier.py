"""Certify a classifier that dpcert did not train: an ordinary PyTorch model and training loop."""

import torch
from torch import Tensor, nn

import dpcert

RECORDS, EPOCHS, SIGMA = 3000, 2, 0.25


class Classifier(nn.Module):
    """Normalization is part of the model, so a radius is a distance between images with pixels in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 16, 5, stride=2), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [batch, classes]."""
        return self.head(self.layers((x - 0.13) / 0.31))


# 1. Train without dpcert. Noise with the same sigma makes the certified radii large.
mnist = dpcert.load_dataset("mnist")
model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for _ in range(EPOCHS):
    for batch in torch.randperm(RECORDS).split(100):
        images = mnist.x_train[batch]
        loss = nn.functional.cross_entropy(model(images + SIGMA * torch.randn_like(images)), mnist.y_train[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

# 2. Certify the model. This assumes nothing about its training and says nothing about privacy.
x, y = mnist.x_test[:20], mnist.y_test[:20]
certificates = dpcert.certify(model.eval(), x, y, sigma=SIGMA, n0=100, n=1000, alpha=0.001)
for label, predicted, radius in zip(y.tolist(), certificates.predict.tolist(), certificates.radius.tolist(), strict=True):
    answer = "abstain" if predicted == -1 else f"class {predicted}, certified up to L2 radius {radius:.3f}"
    print(f"label {label}: {answer}")
print(
    f"average certified radius {certificates.acr:.3f}, certified at 0.25: {100 * certificates.certified_accuracy(0.25):.0f} %"
)

# 3. Deploy the smoothed classifier: the certificates are about this one.
print("smoothed predictions:", dpcert.predict(model, x[:5], sigma=SIGMA, n=1000).tolist())
