"""Train in a process of its own and print its peak memory: ``python -m tests.data.measured FOLDER OUT disk|memory|default``."""

import re
import sys
from pathlib import Path

import numpy as np


def sparse_folder(folder: Path, size: int, shape=(3, 224, 224)) -> int:
    """A folder of arrays whose x_train.npy has `size` bytes (of zeros that take no place); returns the number of records."""
    folder.mkdir()
    count = size // int(np.prod(shape))
    header = {"descr": "|u1", "fortran_order": False, "shape": (count, *shape)}
    with (folder / "x_train.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + count * int(np.prod(shape)))
    np.save(folder / "y_train.npy", np.arange(count, dtype=np.int64) % 10)
    np.save(folder / "x_test.npy", np.zeros((20, *shape), np.uint8))
    np.save(folder / "y_test.npy", np.arange(20) % 10)
    return count


def peak() -> float:
    """The most memory this process had at once (VmHWM), in MiB."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def main(folder: str, out: str, place: str) -> None:
    import torch

    import dpcert
    from dpcert.data import dataset

    if place == "memory":  # the twin
        dataset.LARGEST_IN_MEMORY = 1 << 62
        dataset.available_memory = lambda: 1 << 62
    if place == "disk":
        dataset.LARGEST_IN_MEMORY = 0
    torch.set_num_threads(1)
    shape = dataset.records_and_shape(Path(folder))[1]
    model = torch.nn.Sequential(torch.nn.AvgPool2d(32), torch.nn.Flatten(), torch.nn.Linear(147, 10))
    settings = {"epochs": 1, "delta": 1e-5, "noise_seed": 1, "batch_size": 64, "learning_rate": 0.1}
    warm = torch.zeros(64, *shape)
    dpcert.train(model, dpcert.Dataset(warm, torch.arange(64) % 10, warm, torch.arange(64) % 10), "dpsgd", **settings)
    before = peak()
    data = dataset.read_custom(Path(folder))
    records = len(data.x_train)
    settings |= {"epochs": 6 * 64 / records, "dataset_size": records}
    dpcert.train(model, data, "dpsgd", **settings, out=out)
    assert dpcert.open_run(out, model=model, data=data).data is data
    print(before, peak())


if __name__ == "__main__":
    main(*sys.argv[1:])
