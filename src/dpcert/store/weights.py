"""The facts in the header of a model file, with a digest of the facts and all weights. Does not need PyTorch."""

import hashlib
import json
from collections.abc import Mapping

from safetensors import SafetensorError
from safetensors import deserialize as _deserialize

from ..errors import RunError
from .durable import canonical_json
from .metrics import FORMAT, require_known_format

_KINDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "C64": "complex64"}
_KINDS |= {f"{sign}{bits}": f"{word}{bits}" for sign, word in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)}
_KINDS |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


def read_facts(data: bytes, origin: str) -> dict[str, str]:
    """The facts of a model file. Any changed bit in the facts or the weights is a `RunError`."""
    try:
        digest_of_tensors(data, {})  # validates the header before it is parsed below
        size = int.from_bytes(data[:8], "little")
        facts = dict(json.loads(data[8 : 8 + size]).get("__metadata__") or {})
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{origin} is not a safetensors file ({str(error)[:200]}); restore it from a copy") from error
    require_known_format(origin, facts.get("format", FORMAT))  # before the digest, which other formats may compute differently
    stated = facts.pop("content_sha256", None)
    if stated != digest_of_tensors(data, facts):
        raise RunError(f"{origin} is damaged (its content does not match the SHA-256 in its header); restore it from a copy")
    return facts


def digest_of_tensors(data: bytes, facts: Mapping[str, str]) -> str:
    """Digest of the content of a model file: names, shapes and values of its tensors, and the other `facts`."""
    digest = hashlib.sha256(canonical_json(facts).encode())
    tensors = _deserialize(data)  # type: ignore[no-untyped-call]
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        digest.update(canonical_json([name, f"torch.{_KINDS[tensor['dtype']]}", list(tensor["shape"])]).encode())
        digest.update(tensor["data"])
    return digest.hexdigest()


def with_sorted_header(data: bytes) -> bytes:
    """The same file with a sorted header.

    The safetensors library writes metadata in hash-table order, which differs between processes. Sorted, the same facts
    give the same bytes.
    """
    size = int.from_bytes(data[:8], "little")
    header = canonical_json(json.loads(data[8 : 8 + size])).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]
