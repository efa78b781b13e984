"""The facts of a run in plain sentences, for a reader who knows neither the paper nor the program."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..rounding import ceil_text
from .statistics import by_class, weakest
from .tables import RunFacts

_PLAIN = "it saw each training image as it is"
_NOISY = "it saw each training image together with {copies} noisy {copies_word} of it (noise σ = {sigma})"
_ATTACKED = "it saw each training image together with {copies} noisy {copies_word} of an attacked version (noise σ = {sigma})"
_STABLE = " and was asked to answer all of them alike"
_LARGE = " and was asked for a large certified radius"
_AGREE = " and was asked that its answers to them agree"
_OPEN = ", without any protection of privacy"
_CLIPPED = "; clipped gradients and added noise protect privacy"
_PSAC = "; adaptively clipped gradients (PSAC) and added noise protect privacy"
METHOD_WORDS = {
    "regular": _PLAIN + _OPEN,
    "regular-gaussian": _NOISY + _OPEN,
    "dpsgd": _PLAIN + _CLIPPED,
    "psac": _PLAIN + _PSAC,
    "dp-gaussian": _NOISY + _CLIPPED,
    "dp-smoothadv": _ATTACKED + _CLIPPED,
    "dp-stability": _NOISY + _STABLE + _CLIPPED,
    "dp-macer": _NOISY + _LARGE + _CLIPPED,
    "dp-gaussian+psac": _NOISY + _PSAC,
    "dp-smoothadv+psac": _ATTACKED + _PSAC,
    "dp-gaussian+consistency": _NOISY + _AGREE + _CLIPPED,
    "dp-smoothadv+consistency": _ATTACKED + _AGREE + _CLIPPED,
}
_DATASETS = {
    "mnist": "MNIST (handwritten digits)",
    "fashion-mnist": "Fashion-MNIST (articles of clothing)",
    "cifar10": "CIFAR-10 (photographs)",
}
_MODELS = {"cnn": "A small convolutional network", "linear": "A linear classifier"}
_CLASSES = {
    "fashion-mnist": ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}
HEADLINE_RADIUS = 0.25  # where the paper's Table 1 looks


def in_words(run: RunFacts) -> dict[str, str]:
    """What a newcomer asks, and the answers."""
    answers = {
        "Trained": trained(run),
        "Promised": promised(run),
        "Robust": f"{accurate(run)} {robust(run)}",
        "Fails": failing(run),
    }
    return {question: answer for question, answer in answers.items() if answer}


def run_names(runs: Sequence[RunFacts]) -> list[str]:
    """A short name for each run that tells it from the others: the method, the data set, the folder, a number."""
    several = len({run.metrics["dataset"] for run in runs}) > 1
    names = [run.title if several or len(runs) == 1 else str(run.metrics["method"]) for run in runs]
    names = [run.path.name if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)]
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return numbered


def class_name(run: RunFacts, label: int) -> str:
    """The class as a word where the data set is a public one with words for them."""
    words = () if run.setting("data", "path") else _CLASSES.get(run.metrics["dataset"], ())
    return f"{label} ({words[label]})" if 0 <= label < len(words) else str(label)


def trained(run: RunFacts) -> str:
    """What was trained on what, and how."""
    name, dataset, copies = run.metrics["method"], run.metrics["dataset"], run.setting("method", "copies")
    data = dataset if run.setting("data", "path") else _DATASETS.get(dataset, dataset)
    model = _MODELS.get(str(run.setting("model", "name")), "A model of one’s own")
    how = METHOD_WORDS.get(name, "a combination of one's own (see the settings)").format(
        copies=copies, copies_word="copy" if copies == 1 else "copies", sigma=_plain(run.metrics.get("sigma_train"))
    )
    size = training_size(run)
    images = f"{size:,} training images of " if size else ""
    return f"{model} was trained on {images}{data} with the method {name}: {how}."


def promised(run: RunFacts) -> str:
    """What whoever is in the training set may rely on."""
    privacy = run.metrics["privacy"]
    if not privacy["private"]:
        return f"Nothing is promised about the privacy of the training data (ε = ∞: {privacy['reason']})."
    held_out, but = run.setting("data", "validation"), ""
    if isinstance(held_out, int) and held_out > 0:
        but = f" but the {held_out:,} records held out for validation, which it does not cover"
    return (
        f"Privacy is promised to everyone in the training data{but}: taking any one image out, or putting one in, changes the "
        f"probability of any result by at most a factor e^ε with ε = {ceil_text(privacy['epsilon'], 2)}, but for a "
        f"probability of δ = {privacy['delta']:g}."
    )


def accurate(run: RunFacts) -> str:
    """How often the model is right on images nobody touched."""
    clean = run.metrics["clean_accuracy"]
    return (
        "Its accuracy on the test set was not measured."
        if clean is None
        else f"It is right on {100 * clean:.2f} % of the test images."
    )


def robust(run: RunFacts) -> str:
    """How far an attacker can go without changing the answer."""
    main = run.main
    if main is None:
        return "Its robustness was not certified."
    f, sigma = main.figures, f"{main.figures['sigma']:g}"
    at = f["certified_accuracy"].get(f"{HEADLINE_RADIUS:.2f}")
    text = f"Smoothed with noise σ = {sigma}, it was certified on {f['examples']:,} test images"
    if at is not None:
        text += (
            f": {100 * at:.1f} % of them are answered rightly and provably stay so however their pixels are changed, "
            f"as long as the change is smaller than {HEADLINE_RADIUS} in L2 norm (pixels run from 0 to 1)"
        )
    return f"{text}. The average certified radius is {f['acr']:.3f}."


def failing(run: RunFacts) -> str:
    """On which images the model fails."""
    main = run.main
    if main is None:
        return ""
    silent, wrong = int(main.abstained.sum()), int((~main.correct & ~main.abstained).sum())
    text = f"Of the {len(main.rows):,} images {wrong:,} got a wrong answer and {silent:,} none."
    worst = weakest(by_class(main.rows, [HEADLINE_RADIUS]), HEADLINE_RADIUS)
    if worst is None or worst.certified[HEADLINE_RADIUS] == 1:
        return text
    share = 100 * worst.certified[HEADLINE_RADIUS]
    text += f" It is weakest on class {class_name(run, worst.label)}, of which {share:.1f} % are certified at {HEADLINE_RADIUS}"
    often = worst.mistaken_for[0] if worst.mistaken_for else (0, 0)
    return text + (f"; they are most often mistaken for {class_name(run, often[0])}." if often[1] > 1 else ".")


def training_size(run: RunFacts) -> int | None:
    """The public N, from q = B / N."""
    q, batch = run.metrics["privacy"].get("sampling_probability"), run.setting("train", "batch_size")
    usable = isinstance(q, float) and isinstance(batch, int) and 0 < q <= 1
    return round(batch / q) if usable else None


def differing_settings(runs: Sequence[RunFacts]) -> list[tuple[str, list[str]]]:
    """The config keys that are not the same in all runs, with each run's value."""
    flat = [
        {f"{section}.{key}": value for section, table in run.settings.items() for key, value in table.items()} for run in runs
    ]
    keys = sorted({key for table in flat for key in table})
    rows = [(key, [_plain(table.get(key)) for table in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _plain(value: Any) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
