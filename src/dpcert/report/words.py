"""The facts of a run in plain sentences, for a reader who knows neither the paper nor the program."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..certification.metrics import largest_radius
from ..rounding import ceil_text
from ..store.metrics import PLACES
from .statistics import by_class, weakest
from .tables import Certified, Paper, RunFacts, no_paper

_PLAIN = "it saw the training images unchanged"
_NOISY = "it saw each training image together with {copies} noisy {copies_word} (noise σ = {sigma})"
_ATTACKED = "it saw each training image together with {copies} noisy {copies_word} of an attacked version (noise σ = {sigma})"
_STABLE = " and was trained to give all of them the same answer"
_LARGE = " and was trained for a large certified radius"
_AGREE = " and was trained to give consistent answers to them"
_OPEN = ", without any privacy protection"
_CLIPPED = "; clipped gradients with added noise protect privacy"
_PSAC = "; adaptively clipped gradients (PSAC) with added noise protect privacy"
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
_INSIDE = "it saw {copies} {copies_word} of each training image with noise inside the network (worth σ = {sigma} at its input)"
PRIOR_WORDS = {  # the systems that the paper quotes
    "pixeldp": _INSIDE + _CLIPPED,
    "securesgd": _INSIDE + ", more of it in channels that matter more" + _CLIPPED,
    "dp-denoiser": _NOISY + " through a denoiser in front of a public classifier" + _CLIPPED,
    "stobatch": _INSIDE + " and an attacked version of each, and was trained to reconstruct them" + _CLIPPED,
    "securesgd-as-published": "it was trained as the released code of SecureSGD does" + _OPEN,
    "stobatch-as-published": "it was trained as the released code of StoBatch does" + _OPEN,
}
_DATASETS = {
    "mnist": "MNIST (handwritten digits)",
    "fashion-mnist": "Fashion-MNIST (articles of clothing)",
    "cifar10": "CIFAR-10 (photographs)",
}
_MODELS = {
    "cnn": "A small convolutional network",
    "feature-cnn": "A small convolutional network with a linear head",
    "lenet": "A convolutional network (LeNet)",
    "linear": "A linear classifier",
    "resnet-32": "A small residual network",
    "resnet-48": "A residual network",
    "efficientnet-lite0": "A mobile network (EfficientNet-Lite0)",
    "crossvit-tiny": "A vision transformer (CrossViT-Tiny)",
}
_PARTS = {
    "all": "all layers",
    "head": "the last layer",
    "norms": "the scales and shifts of the normalization layers",
    "biases": "the biases",
    "noise weights": "the noise scales of the channels",
}
CLASSES = {
    "fashion-mnist": ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}
HEADLINE_RADIUS = 0.25  # the radius of the paper's Table 1
_LARGEST_EXPLAINED_EPSILON = 10.0  # above it, e^epsilon is too large to mean anything to a reader


def in_words(run: RunFacts, paper: Paper = no_paper) -> dict[str, str]:
    """The summary of a run: a topic and a few sentences each."""
    topics = {
        "Training": trained(run),
        "Privacy": promised(run),
        "Robustness": f"{accurate(run)} {robust(run)}",
        "Failures": failing(run),
        "Compared": compared(run, paper),
    }
    return {topic: text for topic, text in topics.items() if text}


def run_names(runs: Sequence[RunFacts]) -> list[str]:
    """A short and unique name for each run: the method and, where needed, the data set, the folder or a number."""
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
    """The class label, with its name if the data set is a public one that has class names."""
    words = () if run.setting("data", "path") else CLASSES.get(run.metrics["dataset"], ())
    return f"{label} ({words[label]})" if 0 <= label < len(words) else str(label)


def trained(run: RunFacts) -> str:
    """What was trained on what, and how."""
    name, dataset, copies = run.metrics["method"], run.metrics["dataset"], run.setting("method", "copies")
    data = dataset if run.setting("data", "path") else _DATASETS.get(dataset, dataset)
    model = _MODELS.get(str(run.setting("model", "name")), "A custom model")
    how = (
        (METHOD_WORDS | PRIOR_WORDS)
        .get(name, "a custom combination (see the settings)")
        .format(copies=copies, copies_word="copy" if copies == 1 else "copies", sigma=_plain(run.metrics.get("sigma_train")))
    )
    size = training_size(run)
    images = f"{size:,} training images of " if size else ""
    public = " pretrained on public images" if run.setting("model", "weights") else ""
    return f"{model}{public} was trained on {images}{data} with the method {name}: {how}.{started(run)}{in_phases(run)}"


def started(run: RunFacts) -> str:
    """The public weights that training started from; empty if there are none."""
    return "".join(
        f" It started from the public weights {known['name']} (SHA-256 {known['sha256'][:16]}…), which were trained on "
        f"{known['data']}."
        for known in run.public_inputs
    )


def in_phases(run: RunFacts) -> str:
    """What each phase of the training changed; empty if there was one phase."""
    if not run.phases:
        return ""
    count = {2: "two"}.get(len(run.phases), str(len(run.phases)))
    return f" Training had {count} phases: {', then '.join(map(_phase, run.phases))}."


def _phase(phase: Mapping[str, Any]) -> str:
    parts = [_part(part.strip()) for part in str(phase["trains"]).split(",")]
    share = phase["sampling_probability"]
    images = "all images" if share == 1 else f"{100 * share:.3g} % of the images"
    return f"{' and '.join(parts)} ({phase['steps']} steps of {images})"


def _part(part: str) -> str:
    if part.startswith("last:"):
        return f"the last {part.removeprefix('last:')} parts of the network"
    return _PARTS.get(part, f"the parameters {part}")


def promised(run: RunFacts) -> str:
    """The privacy guarantee for the people in the training set."""
    privacy = run.metrics["privacy"]
    if not privacy["private"]:
        return f"Nothing is promised about the privacy of the training data (ε = ∞: {privacy['reason']})."
    held_out, but = run.setting("data", "validation"), ""
    if isinstance(held_out, int) and held_out > 0:
        but = f" but the {held_out:,} records held out for validation, which it does not cover"
    epsilon = privacy["epsilon"]
    factor = f" = {ceil_text(math.exp(epsilon), 1)}" if epsilon <= _LARGEST_EXPLAINED_EPSILON else ""
    return (
        f"Privacy is guaranteed for every single image of the training data{but}: removing it, or adding one, makes no "
        f"result more likely than e^ε{factor} times its previous probability plus δ "
        f"(ε = {ceil_text(epsilon, 2)}, δ = {privacy['delta']:g}). "
        "Someone who contributed several images is protected less. Test images are not covered."
        + (" Neither are the public images that the initial weights were trained on." if run.public_inputs else "")
    )


def accurate(run: RunFacts) -> str:
    """How often the model is correct on unmodified images."""
    clean = run.metrics["clean_accuracy"]
    return (
        "Its accuracy on the test set was not measured."
        if clean is None
        else f"The network alone is correct on {100 * clean:.2f} % of the test images."
    )


def robust(run: RunFacts) -> str:
    """How much an image can change without changing the answer."""
    main = run.main
    if main is None:
        return "Its robustness was not certified."
    f = main.figures
    at = f["certified_accuracy"].get(f"{HEADLINE_RADIUS:.2f}")
    vote = f"copies of an image with noise σ = {f['sigma']:g}"
    if main.site in PLACES:
        vote = f"answers with {PLACES[main.site]} (worth noise of σ = {f['sigma']:g} on the image)"
    text = f"The smoothed model, a vote over {f['n']:,} {vote}, was certified on "
    text += f"{f['examples']:,} test images"
    if at is not None:
        text += (
            f": {100 * at:.1f} % of them get the correct answer, and it is certified not to change for any change of "
            f"the pixels smaller than {HEADLINE_RADIUS} in L2 norm (pixels are in [0, 1])"
        )
    return f"{text}. The average certified radius is {f['acr']:.3f}, counting 0 if the answer is wrong or missing."


def failing(run: RunFacts) -> str:
    """On which images the model fails."""
    main = run.main
    if main is None:
        return ""
    silent, wrong = int(main.abstained.sum()), int((~main.correct & ~main.abstained).sum())
    text = f"Of the {len(main.rows):,} images, {wrong:,} got a wrong answer and {silent:,} got none."
    if main.skips:
        text += f" Wrong answers are those of the first {main.figures['n0']:,} votes."
    worst = weakest(by_class(main.rows, [HEADLINE_RADIUS]), HEADLINE_RADIUS)
    if worst is None or worst.certified[HEADLINE_RADIUS] == 1:
        return text
    certified = round(worst.images * worst.certified[HEADLINE_RADIUS])
    close = worst.images - certified - worst.wrong - worst.abstained
    often = worst.mistaken_for[0] if worst.mistaken_for else (0, 0)
    taken = f", mostly taken for {class_name(run, often[0])}" if often[1] > 1 else ""
    return (
        f"{text} At radius {HEADLINE_RADIUS}, class {class_name(run, worst.label)} is the weakest: {certified} of "
        f"{worst.images} are certified, {close} are correct with a smaller radius, {worst.wrong} wrong{taken}, "
        f"{worst.abstained} without an answer."
    )


def compared(run: RunFacts, paper: Paper) -> str:
    """The paper's figures for the same request; empty if it has none or if they were not requested."""
    printed = None if run.main is None else paper(run, run.main)
    return "" if printed is None else printed.sentence


def how_they_hold(certified: Sequence[Certified]) -> str:
    """What alpha means for the certificates that are shown."""
    alphas = sorted({float(c.figures["alpha"]) for c in certified})
    chance = " or ".join(f"{100 * (1 - alpha):.10g} %" for alpha in alphas)
    together = [c for c in certified if c.is_simultaneous]
    alone = (
        f"Each individual certificate holds with probability at least {chance}; this is not a bound for all of them at once."
    )
    joint = f"All simultaneous certificates hold together with probability at least {chance}."
    return joint if len(together) == len(certified) else f"{alone} {joint}" if together else alone


def where_it_ends(c: Certified) -> str:
    """The largest radius that this number of votes can certify: the curve ends there for every model."""
    f = c.figures
    most = ceil_text(largest_radius(f["n"], f.get("alpha_each", f["alpha"]), f["sigma"]), 3)
    return f"{f['n']:,} votes with σ = {f['sigma']:g} cannot certify more than {most}, however robust the model is"


def training_size(run: RunFacts) -> int | None:
    """The public N, from q = B / N of the last phase. Training of the head alone has a batch size of its own."""
    q, batch = run.metrics["privacy"].get("sampling_probability"), run.setting("train", "batch_size")
    if run.phases:
        q, batch = run.phases[-1]["sampling_probability"], run.phases[-1]["batch_size"]
    elif run.setting("head", "steps"):
        batch = run.setting("head", "batch_size")
    usable = isinstance(q, float) and isinstance(batch, int) and 0 < q <= 1
    return round(batch / q) if usable else None


def differing_settings(runs: Sequence[RunFacts]) -> list[tuple[str, list[str]]]:
    """The config keys whose values differ between the runs, with each run's value."""
    flat = [
        {f"{section}.{key}": value for section, table in run.settings.items() for key, value in table.items()} for run in runs
    ]
    keys = sorted({key for table in flat for key in table})
    rows = [(key, [_plain(table.get(key)) for table in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _plain(value: Any) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
