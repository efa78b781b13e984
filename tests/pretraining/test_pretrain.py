"""`dpcert pretrain`: public images only, the stated noise law, the same weights after an interruption, an honest card."""

import json
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open

from dpcert.cli import main
from dpcert.data.fingerprint import digests, sketch
from dpcert.data.registry import load_dataset, private_sketches
from dpcert.errors import DataError, RunError
from dpcert.pretraining import images as public
from dpcert.pretraining import train as training
from dpcert.pretraining.images import PublicImages, load_public, noisy_batch, split
from dpcert.pretraining.settings import Settings
from dpcert.pretraining.train import pretrain

ABOUT = {"data": "made up", "license": "none", "data_sha256": "0" * 64}
SMALL = Settings(epochs=2, batch_size=16, held_out=12, learning_rate=0.1)


def made_up(n=120, seed=0):
    generator = np.random.default_rng(seed)
    sources = generator.integers(0, 2, n)
    labels = np.where(sources == 0, generator.integers(0, 3, n), generator.integers(0, 5, n))
    labels[:2], sources[:2] = (2, 4), (0, 1)
    images = generator.integers(0, 256, (n, 3, 16, 16), dtype=np.uint8)
    return PublicImages(images, labels, sources, sketch(digests(images)), removed=0)


def written(tmp_path, **arrays):
    data = made_up()
    arrays = {"x": data.images, "y": data.labels, "source": data.sources, **arrays}
    path = tmp_path / "public.npz"
    np.savez(path, **{name: values for name, values in arrays.items() if values is not None})
    return path


def weights(path):
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in sorted(file.keys())}


def test_interrupted_and_resumed_gives_the_same_bytes(tmp_path):
    data = made_up()
    pretrain(data, tmp_path / "whole.safetensors", SMALL, about=ABOUT)
    for stop_after in (1, 5):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(training, "_update", stopping(training._update, stop_after))
            with pytest.raises(KeyboardInterrupt):
                pretrain(data, tmp_path / "parts.safetensors", SMALL, about=ABOUT)
        assert (tmp_path / "parts.safetensors.checkpoint").exists()
    pretrain(data, tmp_path / "parts.safetensors", SMALL, about=ABOUT)
    assert (tmp_path / "whole.safetensors").read_bytes() == (tmp_path / "parts.safetensors").read_bytes()
    assert not (tmp_path / "parts.safetensors.checkpoint").exists()


def stopping(update, after):
    calls = []

    def wrapped(*arguments):
        calls.append(1)
        if len(calls) == after:
            signal.raise_signal(signal.SIGINT)
        update(*arguments)

    return wrapped


def test_another_request_does_not_touch_the_checkpoint(tmp_path, monkeypatch):
    data, out = made_up(), tmp_path / "a.safetensors"
    monkeypatch.setattr(training, "_update", stopping(training._update, 2))
    with pytest.raises(KeyboardInterrupt):
        pretrain(data, out, SMALL, about=ABOUT)
    checkpoint = tmp_path / "a.safetensors.checkpoint"
    before = checkpoint.read_bytes()
    with pytest.raises(RunError, match="other settings or data \\(epochs 2, now 3\\)"):
        pretrain(data, out, replace(SMALL, epochs=3), about=ABOUT)
    with pytest.raises(RunError, match="different images"):
        pretrain(data, out, SMALL, about={**ABOUT, "data_sha256": "1" * 64})
    assert checkpoint.read_bytes() == before
    checkpoint.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(RunError, match="damaged"):
        pretrain(data, out, SMALL, about=ABOUT)


def test_the_card_names_the_data_the_noise_and_the_accuracy(tmp_path):
    out = tmp_path / "b.safetensors"
    card = pretrain(made_up(), out, SMALL, about=ABOUT)
    with safe_open(out, "pt") as file:
        header = file.metadata()
    assert json.loads(header["dpcert_card"]) == card and len(json.loads(header["data_sketch"])) == 120
    assert (
        card["public_classes"] == [3, 5] and card["images"] == 108 and set(card["accuracy"]) == {"0.00", "0.25", "0.50", "1.00"}
    )
    page = (tmp_path / "b.md").read_text()
    assert "without privacy" in page and "made up" in page and card["noise"] in page
    assert weights(out)["standardize.mean"].abs().max() > 0


def test_standardizing_leaves_the_public_head_as_it_was():
    data = made_up()
    state = training._fresh(SMALL, data, torch.device("cpu"))
    model = training._released(state, SMALL, data, torch.device("cpu"))
    x = torch.rand(8, 3, 16, 16)
    before = model(x)
    training._standardize(model, data, bytes(32), 0, SMALL, torch.device("cpu"))
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    features = model.standardize(model.features(noisy_batch(data, np.arange(120), bytes(32), 99, torch.device("cpu"))))
    assert features.mean(dim=0).abs().max() < 0.6 and 0.5 < features.std(dim=0).median() < 1.5


def test_the_noise_law_is_the_one_on_the_card():
    """Residuals of flat gray images, which flips leave alone; shifts bring in black, so only the middle is looked at."""
    data = replace(made_up(4000), images=np.full((4000, 3, 16, 16), 128, np.uint8))
    batch = noisy_batch(data, np.arange(4000), bytes(32), 0, torch.device("cpu"))
    sigmas = (batch[:, :, 4:12, 4:12] - 128 / 255).flatten(1).std(dim=1)
    assert abs(float((sigmas < 1e-3).float().mean()) - public.CLEAN_SHARE) < 0.02
    for sigma in public.SIGMAS:
        near = ((sigmas / sigma - 1).abs() < 0.12).float().mean()
        assert 0.22 < float(near) < 0.32
    assert float(sigmas.max()) < 1.3
    assert torch.equal(batch, noisy_batch(data, np.arange(4000), bytes(32), 0, torch.device("cpu")))
    assert not torch.equal(batch, noisy_batch(data, np.arange(4000), bytes(32), 1, torch.device("cpu")))


def test_flips_and_shifts_move_whole_images():
    image = torch.arange(16 * 16, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(3, 1, 16, 16)
    still, no = torch.full((3,), public.LARGEST_SHIFT), torch.zeros(3, dtype=torch.bool)
    assert torch.equal(public._flipped_and_shifted(image, no, still, still), image)
    assert torch.equal(public._flipped_and_shifted(image, ~no, still, still), image.flip(3))
    down = public._flipped_and_shifted(image, no, still + 1, still)
    assert torch.equal(down[:, :, :-1], image[:, :, 1:]) and bool((down[:, :, -1] == 0).all())


def test_held_out_images_are_not_trained_on():
    training_part, held_out = split(made_up(), 12, bytes(32))
    assert not set(digests(training_part.images)) & set(digests(held_out.images)) and len(held_out) == 12


def test_a_private_set_is_refused_even_shuffled_and_in_part(tmp_path, capsys):
    mnist = load_dataset("mnist")
    order = np.random.default_rng(0).permutation(len(mnist.x_train))[:20_000]
    x = np.rint(mnist.x_train.numpy()[order] * 255).astype(np.uint8)
    path = tmp_path / "mine.npz"
    np.savez(path, x=x, y=mnist.y_train.numpy()[order])
    with pytest.raises(DataError, match="contains images of mnist, which dpcert treats as private data"):
        load_public(path, private_sketches())
    with pytest.raises(SystemExit) as stopped:
        main(["pretrain", "--data", str(path), "--out", str(tmp_path / "w.safetensors")])
    assert stopped.value.code == 2 and "contains images of mnist" in capsys.readouterr().err
    assert not (tmp_path / "w.safetensors").exists()


def test_near_duplicates_of_cifar10_are_left_out(tmp_path, monkeypatch):
    path, listed = written(tmp_path), frozenset(digests(made_up().images)[3:10])
    monkeypatch.setattr(public, "near_duplicates", lambda: listed)
    data = load_public(path, {})
    assert data.removed == 7 and len(data) == 113 and not listed & set(digests(data.images))


def test_the_committed_list_is_what_it_says():
    text = public.resources.files("dpcert.pretraining").joinpath("near_duplicates.txt").read_text()
    assert text.startswith(f"# {len(public.near_duplicates())} of 150000 public images correlate above 0.9")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.zeros((120, 16, 16, 3), np.uint8)}, "must be uint8 \\[n, 1 or 3, height, width\\]"),
        ({"x": np.zeros((120, 3, 16, 16), np.float32)}, "must be uint8"),
        ({"y": np.zeros(119, np.int64)}, "y must have an integer for each of the 120 images"),
        ({"y": np.full(120, -1)}, "y has values -1 to -1"),
        ({"source": np.zeros(120, np.float32)}, "source must have an integer"),
        ({"y": None}, "has no array 'y'"),
    ],
)
def test_bad_public_data_is_one_line(tmp_path, arrays, words):
    with pytest.raises(DataError, match=words):
        load_public(written(tmp_path, **arrays), {})


def test_the_command_pretrains_and_a_second_time_has_nothing_to_do(tmp_path, capsys, monkeypatch):
    out = tmp_path / "w.safetensors"
    command = ["pretrain", "--data", str(written(tmp_path)), "--out", str(out), "--epochs", "1", "--batch-size", "16"]
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 0 and "card: " in capsys.readouterr().out
    before = out.read_bytes()
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 0 and "nothing to do" in capsys.readouterr().out and out.read_bytes() == before


@pytest.mark.parametrize(
    ("option", "value"), [("--model", "resnet-99"), ("--epochs", "0"), ("--batch-size", "1"), ("--learning-rate", "-1")]
)
def test_wrong_options_are_one_line(tmp_path, capsys, option, value):
    with pytest.raises(SystemExit) as stopped:
        main(["pretrain", "--data", str(written(tmp_path)), "--out", str(tmp_path / "w.safetensors"), option, value])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and value in error


@pytest.mark.parametrize("name", ["missing/w.safetensors", "w.md", "w"])
def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path, capsys, name):
    with pytest.raises(SystemExit) as stopped:
        main(["pretrain", "--data", str(written(tmp_path)), "--out", str(tmp_path / name)])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and "create the folder first" in error


@pytest.mark.parametrize("below", ["", "train"])
def test_a_folder_of_pictures_is_read_as_the_same_arrays_are(tmp_path, below):
    from PIL import Image

    images = np.random.default_rng(0).integers(0, 256, (8, 3, 16, 16), dtype=np.uint8)
    for number, image in enumerate(images):
        file = tmp_path / "public" / below / f"class-{number // 4}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.transpose(1, 2, 0)).save(file)
    found = load_public(tmp_path / "public", {})
    expected = load_public(written(tmp_path, x=images, y=np.arange(8) // 4, source=None), {})
    assert np.array_equal(found.images, expected.images) and found.labels.tolist() == expected.labels.tolist()
    assert found.classes == expected.classes == (2,) and found.sketch == expected.sketch
    assert digests(found.images)[0] in found.sketch
    with pytest.raises(DataError, match="contains images of zoo, which dpcert treats as private data"):
        load_public(tmp_path / "public", {"zoo": expected.sketch})
    (tmp_path / "public" / below / "class-1" / "9.png").write_bytes(b"no")
    with pytest.raises(DataError, match="9.png is not a readable PNG"):
        load_public(tmp_path / "public", {})
