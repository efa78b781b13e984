"""Damage to valid files: bit flips, cuts, splices, insertions, edited lengths and numbers, and nasty values in valid JSON."""

import copy
import json
from random import Random

INTERESTING = (0, 1, 2, 127, 128, 255, 256, 32767, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
TOKENS = (
    b"nan", b"inf", b"-1", b"1e999", b"NaN", b"Infinity", b"null", b"true", b"[[[[", b"{{", b'""', b"\0", b"\xff\xfe", b"\t",
    b"\n", b"'", b"\\", b"../../", b"0x" + b"f" * 4000, b"9" * 5000, b"[" * 3000, b"{'a':" * 300, b"(" * 250, b"True", b"1_0",
    b"1979-05-27T07:32:00Z", "é١".encode(), b"\xed\xa0\x80", b"'O'", b"|O", b"PK\x03\x04", b"\x80\x04\x95",
)  # fmt: skip
NASTY = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, 10**400, 0.5, -0.0, 1e308, 5e-324, "", "x", "none", "poisson", "../../etc",
    "0" * 64, "\0", "é", "x" * 3000, [], [0], [[]], [1, None], {}, {"a": 1}, [[[[[[]]]]]],
)  # fmt: skip


def mutated(random: Random, seeds: list[bytes]) -> bytes:
    """One to four kinds of damage to one of the seeds."""
    data = bytearray(random.choice(seeds))
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        random.choice(KINDS)(random, data, seeds)
    return bytes(data)


def _place(random: Random, data: bytearray) -> int:
    """A position; half of them near the start, where headers are, some near the end, where directories are."""
    size = max(1, len(data))
    near = random.random()
    return (
        random.randrange(min(size, 128))
        if near < 0.4
        else size - 1 - random.randrange(min(size, 128))
        if near < 0.6
        else random.randrange(size)
    )


def _flip(random: Random, data: bytearray, seeds: list[bytes]) -> None:
    for _ in range(random.choice((1, 1, 2, 8))):
        if data:
            data[_place(random, data)] ^= 1 << random.randrange(8)


def _cut(random: Random, data: bytearray, seeds: list[bytes]) -> None:
    del data[_place(random, data) :]


def _remove(random: Random, data: bytearray, seeds: list[bytes]) -> None:
    start = _place(random, data)
    del data[start : start + random.choice((1, 2, 4, 16, 300))]


def _insert(random: Random, data: bytearray, seeds: list[bytes]) -> None:
    place = _place(random, data)
    data[place:place] = random.choice((random.randbytes(random.choice((1, 4, 40))), random.choice(TOKENS)))


def _overwrite(random: Random, data: bytearray, seeds: list[bytes]) -> None:
    place, token = _place(random, data), random.choice(TOKENS)
    data[place : place + len(token)] = token


def _splice(random: Random, data: bytearray, seeds: list[bytes]) -> None:
    other = random.choice(seeds)
    start = random.randrange(max(1, len(other)))
    data[_place(random, data) :] = other[start:]


def _repeat(random: Random, data: bytearray, seeds: list[bytes]) -> None:
    start = _place(random, data)
    part = bytes(data[start : start + random.choice((1, 8, 64, 512))])
    data[start:start] = part * random.choice((1, 2, 20))


def _length(random: Random, data: bytearray, seeds: list[bytes]) -> None:
    """A whole number of 1, 2, 4 or 8 bytes, in either order, written over what is there."""
    size = random.choice((1, 2, 4, 8))
    value = (random.choice(INTERESTING) + random.choice((0, 0, -1, 1))) % 2 ** (8 * size)
    place = _place(random, data)
    data[place : place + size] = value.to_bytes(size, random.choice(("little", "big")))


def _digits(random: Random, data: bytearray, seeds: list[bytes]) -> None:
    """Another number where digits stand."""
    places = [place for place, byte in enumerate(data) if 48 <= byte < 58]
    if places:
        start = stop = random.choice(places)
        while stop < len(data) and 48 <= data[stop] < 58:
            stop += 1
        data[start:stop] = random.choice((str(random.choice(INTERESTING)), "-1", "1e999", "nan", "0.5", "")).encode()


KINDS = (_flip, _flip, _cut, _remove, _insert, _overwrite, _splice, _repeat, _length, _length, _digits)


def nasty(random: Random, value: object) -> object:
    """A JSON value with one to three of its places replaced by something of another kind, removed, or added."""
    value = json.loads(json.dumps(value))
    for _ in range(random.choice((1, 1, 2, 3))):
        value = _change(random, value)
    return value


def _change(random: Random, value: object) -> object:
    if isinstance(value, dict) and value and random.random() < 0.95:
        key = random.choice(sorted(value))
        if random.random() < 0.15:
            del value[key]
        elif random.random() < 0.1:
            value[random.choice(("", "event", "x", key + "x"))] = copy.deepcopy(random.choice(NASTY))
        else:
            value[key] = _change(random, value[key])
        return value
    if isinstance(value, list) and value and random.random() < 0.7:
        place = random.randrange(len(value))
        value[place] = _change(random, value[place])
        return value
    return copy.deepcopy(random.choice(NASTY))
