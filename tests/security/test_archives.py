"""S3: archives are read member by member with caps and never extracted; hostile members are refused in bounded memory."""

import gzip
import io
import stat
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from dpcert.data import cifar, registry
from dpcert.data.dataset import read_npz
from dpcert.errors import DataError
from tests.conftest import blobs
from tests.fuzz.readers import FOLDER, member, tar_of

MOST_MEMORY = 48 << 20
SMALL = blobs(0, train=6, test=4, size=4)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=True)
    return file.getvalue()


def npy_with(header: str, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    """An .npy file with any text as its header."""
    size = struct.pack("<H" if version[0] == 1 else "<I", len(header))
    return b"\x93NUMPY" + version + size + header.encode("latin1") + body


def archive(path: Path, changes: dict[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED) -> Path:
    """The four arrays, some of them replaced."""
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, array in SMALL.items():
            file.writestr(f"{name}.npy", (changes or {}).get(name, npy(array)))
    return path


def with_member(name: str, mode: int = stat.S_IFREG | 0o644, data: bytes = b"x"):
    def make(path: Path) -> None:
        archive(path)
        info = zipfile.ZipInfo(name)
        info.filename = info.orig_filename = name  # as it stands: ZipInfo would tidy it up
        info.external_attr = mode << 16
        with zipfile.ZipFile(path, "a") as file:
            file.writestr(info, data)

    return make


def replaced(data: bytes, name: str = "x_train"):
    return lambda path: archive(path, {name: data})


def header_of(shape: str, descr: str = "'<f4'") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n"


def duplicate(path: Path) -> None:
    archive(path)
    with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate"):
        file.writestr("x_train.npy", npy(SMALL["x_train"]))


def directory_field(offset: int, form: str, value: int, also_local: int | None = None):
    """A field of the first entry in the central directory changed (and in the local header, where it has one)."""

    def make(path: Path) -> None:
        data = bytearray(archive(path).read_bytes())
        struct.pack_into(form, data, data.index(b"PK\x01\x02") + offset, value)
        if also_local is not None:
            struct.pack_into(form, data, also_local, value)
        path.write_bytes(bytes(data))

    return make


def bomb(path: Path) -> None:
    """300 MiB of zeros in 300 kB, with a header that tells the truth."""
    count = 300 << 20
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, array in SMALL.items():
            with file.open(f"{name}.npy", "w") as target:
                if name != "x_train":
                    target.write(npy(array))
                    continue
                target.write(npy_with(header_of(f"({count // 16}, 4, 4)", "'|u1'")))
                for _ in range(300):
                    target.write(bytes(1 << 20))


def nested(path: Path) -> None:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as file:
        file.writestr("x_train.npy", npy(SMALL["x_train"]))
    archive(path, {"x_train": inner.getvalue()})


def many(path: Path) -> None:
    archive(path)
    with zipfile.ZipFile(path, "a") as file:
        for number in range(1000):
            file.writestr(f"a{number}.npy", b"")


def damaged(cut: slice, flip: int | None = None):
    def make(path: Path) -> None:
        data = bytearray(archive(path).read_bytes()[cut])
        if flip is not None:
            data[flip] ^= 1
        path.write_bytes(bytes(data))

    return make


def lying_small(path: Path) -> None:
    """The directory says 4 bytes; the deflate stream goes on for 64 MiB."""
    archive(path, {"x_train": bytes(64 << 20)}, zipfile.ZIP_DEFLATED)
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, data.index(b"PK\x01\x02") + 24, 4)
    path.write_bytes(bytes(data))


HOSTILE = {
    "path traversal": with_member("../x.npy"),
    "absolute path": with_member("/etc/x.npy"),
    "drive letter": with_member("C:x.npy"),
    "backslashes": with_member("..\\x.npy"),
    "folder": with_member("sub/x.npy"),
    "folder entry": with_member("d/", stat.S_IFDIR | 0o755, b""),
    "symbolic link": with_member("link.npy", stat.S_IFLNK | 0o777, b"/etc/passwd"),
    "device": with_member("device.npy", stat.S_IFCHR | 0o600),
    "not an array's name": with_member("x_train.pkl"),
    "NUL in the name": with_member("x\0.npy"),
    "there twice": duplicate,
    "encrypted": directory_field(8, "<H", 0x1, also_local=6),
    "unusual compression": lambda path: archive(path, compression=zipfile.ZIP_LZMA),
    "compression of another number": directory_field(10, "<H", 99, also_local=8),
    "bomb": bomb,
    "declared 4 GiB": directory_field(24, "<I", 0xFFFFFFF0),
    "declared small, unpacks to 64 MiB": lying_small,
    "2^40 elements": replaced(npy_with(header_of(f"({2**40},)"), bytes(64))),
    "2^33 bytes, little behind": replaced(npy_with(header_of(f"({2**31},)"), bytes(64))),
    "sizes that overflow": replaced(npy_with(header_of(f"({2**62}, {2**62}, 4)"), bytes(64))),
    "negative size": replaced(npy_with(header_of("(-1, 4, 4)"), bytes(64))),
    "no elements, huge sizes": replaced(npy_with(header_of(f"(0, {2**62}, {2**62})"))),
    "objects": replaced(npy(np.array([{}], dtype=object)), "y_train"),
    "records": replaced(npy(np.zeros(6, dtype=[("a", "<f4"), ("b", "O")])), "y_train"),
    "text": replaced(npy(np.array(["a"] * 6)), "y_train"),
    "subarray of 2^31": replaced(npy_with(header_of("(6,)", f"('<f4', ({2**31},))"), bytes(24)), "y_train"),
    "code for a header": replaced(npy_with("__import__('os').system('true')\n"), "y_train"),
    "deep header": replaced(npy_with("(" * 1500 + "\n"), "y_train"),
    "header of 4 GiB": replaced(b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + bytes(64), "y_train"),
    "format of the future": replaced(npy_with(header_of("(6,)", "'<i8'"), bytes(48), b"\x09\x00"), "y_train"),
    "archive in the archive": nested,
    "a thousand members": many,
    "cut": damaged(slice(None, -40)),
    "cut at the front": damaged(slice(30, None)),
    "a flipped bit": damaged(slice(None), flip=150),
}


def peak_of(read) -> int:
    tracemalloc.start()
    try:
        read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def refusal(path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_npz(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_hostile_members_are_refused_in_bounded_memory(tmp_path, evidence):
    """S3: each archive differs from a good one in one member."""
    read_npz(archive(tmp_path / "good.npz"))
    read_npz(archive(tmp_path / "packed.npz", compression=zipfile.ZIP_DEFLATED))
    peaks = {}
    for name, make in HOSTILE.items():
        path = tmp_path / "hostile.npz"
        path.unlink(missing_ok=True)
        make(path)
        peaks[name] = peak_of(lambda path=path: refusal(path))
    assert max(peaks.values()) < MOST_MEMORY, peaks
    assert {file.name for file in tmp_path.iterdir()} == {"good.npz", "packed.npz", "hostile.npz"}  # nothing was extracted
    figure = f"{len(HOSTILE)} of {len(HOSTILE)} hostile archives refused, at most {max(peaks.values()) >> 20} MiB each"
    evidence("S3", figure=figure, trials=len(HOSTILE), twin="np.load and extractall: read or extract several")


def test_twin_careless_readers_are_seen(tmp_path):
    """NumPy's own reader takes several of them, and extracting writes what it is told to."""
    taken = []
    for name in ("path traversal", "symbolic link", "there twice", "a thousand members", "not an array's name"):
        path = tmp_path / "hostile.npz"
        path.unlink(missing_ok=True)
        HOSTILE[name](path)
        with np.load(path, allow_pickle=False) as file:
            taken += [name] if file["x_train"].shape == (6, 4, 4) else []
    assert len(taken) == 5
    with zipfile.ZipFile(path) as file:
        file.extractall(tmp_path / "out")
    assert (tmp_path / "out" / "x_train.pkl").exists()


BATCH = bytes(cifar.RECORD_BYTES)
GOOD = [(f"{FOLDER}/{name}", {}, BATCH) for name in registry.CIFAR10.digests]


def tar_with(*extra: tuple[str, dict[str, object], bytes], leave_out: int = 0) -> bytes:
    return tar_of(*((member(name, len(data), **changes), data) for name, changes, data in [*extra, *GOOD[leave_out:]]))


def pax_bomb() -> bytes:
    """An extended header of 8 MiB of zeros, which tarfile reads into memory as a whole."""
    info = member("./PaxHeaders/x", 8 << 20, type=tarfile.XHDTYPE)
    return info.tobuf(tarfile.USTAR_FORMAT) + bytes(8 << 20) + tar_with()


HOSTILE_TARS = {
    "path traversal": tar_with(("../../data_batch_1.bin", {}, BATCH)),
    "absolute path": tar_with(("/tmp/data_batch_1.bin", {}, BATCH)),
    "another folder": tar_with(("other/data_batch_1.bin", {}, BATCH)),
    "symbolic link": tar_with((GOOD[0][0], {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, b""), leave_out=1),
    "hard link": tar_with((GOOD[0][0], {"type": tarfile.LNKTYPE, "linkname": GOOD[1][0]}, b""), leave_out=1),
    "device": tar_with((GOOD[0][0], {"type": tarfile.CHRTYPE}, b""), leave_out=1),
    "folder of that name": tar_with((GOOD[0][0], {"type": tarfile.DIRTYPE}, b""), leave_out=1),
    "wrong size": tar_with((GOOD[0][0], {}, BATCH[:-1]), leave_out=1),
    "there twice": tar_with(GOOD[0]),
    "one missing": tar_with(leave_out=1),
    "other bytes": tar_with((GOOD[0][0], {}, b"\1" * len(BATCH)), leave_out=1),
    "more than it should hold": tar_with(("zeros", {}, bytes(32 << 20))),
    "huge extended header": pax_bomb(),
    "declared size of 8 GiB": tar_with()[:124] + b"77777777777\0" + tar_with()[136:],
    "cut": tar_with()[:5000],
    "not a tar": b"\1" * 5000,
    "empty": b"",
}


@pytest.fixture
def small_batches(monkeypatch, tmp_path):
    import dataclasses

    digest = registry.fetch.sha256_hex(BATCH)
    source = dataclasses.replace(registry.CIFAR10, digests=dict.fromkeys(registry.CIFAR10.digests, digest))
    monkeypatch.setattr(cifar, "BATCH_RECORDS", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def fetch(data: bytes) -> None:
        def download(url, target, accept, progress):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

        monkeypatch.setattr(registry.fetch, "download", download)
        registry._fetch_cifar(source, lambda *rest, **facts: None)

    return fetch


def test_hostile_members_of_the_cifar_archive_are_refused(small_batches, tmp_path, evidence):
    """S3: nothing outside the cache is written, and into it only files with the published digest."""
    small_batches(gzip.compress(tar_with()))
    cached = tmp_path / "cache" / "dpcert" / FOLDER
    assert sorted(file.name for file in cached.iterdir()) == sorted(registry.CIFAR10.digests)
    peak = 0
    packed = {name: gzip.compress(data, 1) for name, data in HOSTILE_TARS.items()}
    packed |= {
        "cut gzip": packed["there twice"][:2000],
        "not gzip": b"nothing",
        "damaged gzip": _damaged(gzip.compress(tar_with())),
    }

    def refused(data: bytes) -> None:
        with pytest.raises(DataError, match="did not send a valid archive"):
            small_batches(data)

    for data in packed.values():
        peak = max(peak, peak_of(lambda data=data: refused(data)))
        kept = [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
        assert all(file.parent == cached and file.read_bytes() == BATCH for file in kept)
    assert peak < MOST_MEMORY
    figure = f"{len(packed)} of {len(packed)} hostile tar archives refused, at most {peak >> 20} MiB each"
    evidence("S3", figure=figure, trials=len(packed), twin="tarfile.extractall: writes outside its folder")


def _damaged(data: bytes) -> bytes:
    return data[:60] + bytes(byte ^ 0x55 for byte in data[60:80]) + data[80:]


def test_twin_extracting_writes_outside_its_folder(tmp_path):
    """What the archives would do to a careless reader; and the bombs are as large as they say."""
    target = tmp_path / "a" / "b"
    target.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(HOSTILE_TARS["path traversal"])) as tar:
        tar.extractall(target, filter="fully_trusted")
    assert (tmp_path / "data_batch_1.bin").exists()
    assert len(zlib.decompress(gzip.compress(HOSTILE_TARS["more than it should hold"], 1), 31)) > 32 << 20
