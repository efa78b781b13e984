"""Train on custom data: from arrays to a private and certified model."""

import numpy as np

import dpcert

RECORDS, CLASSES, EPOCHS = 1000, 5, 3


def my_images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Replace this with your data: RGB images of 16 x 16 pixels, each class with a bright bar in a different place."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, CLASSES, count)
    images = generator.uniform(0.0, 0.3, (count, 3, 16, 16)).astype(np.float32)
    for image, label in zip(images, labels, strict=True):
        image[label % 3, 3 * label : 3 * label + 3] += 0.7
    return images, labels


# 1. Images [N, channels, height, width] as floats in [0, 1] or uint8; labels 0 to classes - 1.
x_train, y_train = my_images(RECORDS, seed=0)
x_test, y_test = my_images(200, seed=1)
data = dpcert.Dataset(x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, classes=CLASSES)

# 2. Train privately. Delta should be well below 1 / records.
trained = dpcert.train(
    "cnn",
    data,
    dpcert.method("dp-gaussian", sigma=0.25),
    epsilon=3.0,
    delta=1e-5,
    epochs=EPOCHS,
    batch_size=100,
    out="runs/custom-data",
)
print(trained.statement)

# 3. Open the run, in this process or in another one.
run = dpcert.open_run("runs/custom-data", data=data)
certificates = run.certify(examples=20, n=1000)
print(
    f"average certified radius {certificates.acr:.3f}, certified at 0.25: {100 * certificates.certified_accuracy(0.25):.0f} %"
)
print("predictions:", run.predict(data.x_test[:5], n=1000).tolist(), "labels:", data.y_test[:5].tolist())
print("report:", run.report())
