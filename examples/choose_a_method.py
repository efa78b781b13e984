"""Compare two methods at the same privacy budget: plain DP-SGD, and noisy views of each record (dp-gaussian)."""

import dpcert

# These small sizes show how to compare, not which method wins. For that, use MODEL = "cnn", 60,000 records and 40 epochs.
MODEL, RECORDS, EPOCHS, SIGMA = "linear", 1000, 5, 0.5
BUDGET = {"epsilon": 3.0, "delta": 1e-5}

mnist = dpcert.load_dataset("mnist")
data = dpcert.Dataset(  # choose on held-out training records, never on the test set
    x_train=mnist.x_train[:RECORDS],
    y_train=mnist.y_train[:RECORDS],
    x_test=mnist.x_train[-500:],
    y_test=mnist.y_train[-500:],
    classes=10,
)

print("method        epsilon  accuracy  average certified radius (95 % interval)")
for name in ("dpsgd", "dp-gaussian"):
    views = {"sigma": SIGMA, "copies": 2} if name == "dp-gaussian" else {}
    run = dpcert.train(MODEL, data, dpcert.method(name, **views), **BUDGET, epochs=EPOCHS, batch_size=100, seed=0)
    accuracy = (run.model(data.x_test).argmax(1) == data.y_test).float().mean()
    certificates = dpcert.certify(run.model, data.x_test[:50], data.y_test[:50], sigma=SIGMA, n=1000)
    radius = certificates.acr_estimate
    print(f"{name:12}  {run.epsilon:7.2f}  {100 * accuracy:6.1f} %  {radius.value:.3f} ({radius.low:.3f} to {radius.high:.3f})")

print("If the intervals overlap widely, certify more images or train on more records before you choose.")
print("Epsilon covers each run separately. It does not cover the choice between them; each statement says so.")
