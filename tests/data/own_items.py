"""Map-style datasets of many kinds, in a module so that worker processes can import them; without torch, which takes long."""

import os
import sqlite3
import threading
import time

import numpy as np

COUNT = 40


def pixels(index: int, shape=(3, 6, 5)) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 256, shape, dtype=np.uint8)


class Items:
    """Plain uint8 items; `odd` replaces what record `at` gives, `calls` counts how often each was asked for."""

    def __init__(self, count=COUNT, at=-1, odd=None, after=0):
        self.count, self.at, self.odd, self.after = count, at, odd, after
        self.calls: dict[int, int] = {}
        self.threads: set[int] = set()

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        self.threads.add(threading.get_ident())
        self.calls[index] = self.calls.get(index, 0) + 1
        if index == self.at and self.calls[index] > self.after:
            return self.odd(index)
        return pixels(index), index % 3

    def __getstate__(self):
        return {**self.__dict__, "calls": {}, "threads": set()}


def raising(index):
    raise RuntimeError("the disk is\non fire")


def ending(index):
    os._exit(3)


def changed(index):
    return pixels(index + 1000), index % 3


def relabeled(index):
    return pixels(index), (index + 1) % 3


def as_floats(index):
    return pixels(index).astype(np.float32) / np.float32(255), index % 3


class Torch:
    """As most users write it: tensors, and a label that is one too."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        import torch

        return torch.from_numpy(pixels(index)).float() / 255, torch.tensor(index % 3)


class Augmented(Items):
    """Random crops, noise, flips ..."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image[:, :, :: np.random.default_rng().choice([1, -1])] ^ np.uint8(time.time_ns() % 256), label


class InDatabase(Items):
    """Its connection may be used in the thread that opened it only."""

    def __init__(self):
        super().__init__()
        self.connection = sqlite3.connect(":memory:")

    def __getitem__(self, index):
        self.connection.execute("select 1")
        return super().__getitem__(index)


class Slow(Items):
    """Takes a while, as decoding does."""

    def __getitem__(self, index):
        time.sleep(0.002)
        return super().__getitem__(index)


class NoLength:
    def __getitem__(self, index):
        return pixels(index), 0


class BadLength(Items):
    def __len__(self):
        raise OSError("no index file")


class FromFile(Items):
    """One open file for all threads: `seek` and `read` of two threads would mix."""

    def __init__(self, path, count):
        super().__init__(count)
        self.file = path.open("rb")

    def __getitem__(self, index):
        self.file.seek(index * 90)
        time.sleep(0)
        return np.frombuffer(self.file.read(90), np.uint8).reshape(3, 6, 5), index % 3
