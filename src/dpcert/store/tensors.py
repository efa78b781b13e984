"""Safetensors files as bytes; no torch."""

import json

from .durable import canonical_json


def with_sorted_header(data: bytes) -> bytes:
    """The same file with its header in order.

    The library writes metadata in the order of a hash table, another in each process; in order, the same facts give the
    same bytes.
    """
    size = int.from_bytes(data[:8], "little")
    header = canonical_json(json.loads(data[8 : 8 + size])).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]
