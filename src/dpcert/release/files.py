"""The public files of a run as bytes, from its directory or from a bundle; a bundle is never extracted to disk.

A bundle is a zip file without compression: the same run gives the same bytes with every version of zlib, and the content
cannot be larger than the file. Members are read into memory one by one. An unknown name, or a compressed, duplicate or
oversized member, is refused before any of its bytes are used.
"""

import io
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path

from ..errors import RunError
from ..store.durable import refuse_link, write_atomically
from ..store.public import ROWS, PublicFiles, most_bytes, read_directory
from ..store.runs import CONFIG, CURVE, LEDGER, METRICS, MODEL, REPORT

STATEMENT, MANIFEST = "statement.txt", "bundle.json"
MOST_MEMBERS = 1000
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that zip can represent


def read_public_files(path: Path) -> PublicFiles:
    """The public files of a run directory, or the members of a bundle."""
    if path.is_dir():
        return read_directory(path)
    if path.is_file():
        return PublicFiles(path, _read_bundle(path), is_bundle=True)
    raise RunError(f"{path} does not exist; pass a run directory or a bundle created with: dpcert export RUN FILE")


def is_known(name: str) -> bool:
    """Whether a bundle may contain a file of this name."""
    return name in (CONFIG, LEDGER, METRICS, MODEL, REPORT, STATEMENT, MANIFEST, CURVE) or ROWS.fullmatch(name) is not None


def _read_bundle(path: Path) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _refuse_odd_archive(path, members)
            return {member.filename: _read_member(path, archive, member) for member in members}
    except RunError:
        raise
    except Exception as error:  # a hostile archive may raise anything
        raise RunError(f"{path} is not a readable bundle ({error}); create one with: dpcert export RUN FILE") from error


def _refuse_odd_archive(path: Path, members: list[zipfile.ZipInfo]) -> None:
    names = [member.filename for member in members]
    if not names or len(names) > MOST_MEMBERS:
        raise RunError(
            f"{path} has {len(names)} members, must have 1 to {MOST_MEMBERS}; create the bundle with: dpcert export RUN FILE"
        )
    if len(set(names)) != len(names):
        raise RunError(f"{path} contains a member twice; it is damaged or not made by dpcert export")
    total = sum(member.file_size for member in members)
    if total > path.stat().st_size:  # members overlap, or their stated sizes are wrong
        raise RunError(
            f"{path} states {total} bytes of content, more than the file has; it is damaged or not made by dpcert export"
        )


def _read_member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    name, most = member.filename, most_bytes(member.filename)
    kind = stat.S_IFMT(member.external_attr >> 16)
    wrong = {
        "its name is not allowed in a bundle": not is_known(name) or member.orig_filename != name,
        "it is compressed": member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size,
        "it is encrypted": bool(member.flag_bits & 0x1),
        "it is not a plain file": kind not in (0, stat.S_IFREG) or bool(member.external_attr & 0x10),
        f"it has {member.file_size} bytes, the limit is {most}": member.file_size > most,
    }
    reason = next((words for words, holds in wrong.items() if holds), None)
    if reason is not None:
        raise RunError(f"{path} member {name[:60]!r}: {reason}; it is damaged or not made by dpcert export")
    with archive.open(member) as file:
        data = file.read(most + 1)  # zipfile checks the checksum at the end
    if len(data) != member.file_size:
        raise RunError(f"{path} member {name!r} has {len(data)} bytes, expected {member.file_size}; it is damaged")
    return data


def bundle_bytes(content: Mapping[str, bytes]) -> bytes:
    """The bundle of `content`: sorted members, one fixed time, no compression. The same content gives the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(content):
            member = zipfile.ZipInfo(name, _EPOCH)
            member.create_system, member.external_attr = 3, (stat.S_IFREG | 0o644) << 16
            archive.writestr(member, content[name])
    return buffer.getvalue()


def write_new(path: Path, data: bytes) -> bool:
    """Write a new file atomically; return False if it already exists with the same bytes."""
    refuse_link(path)  # including a dangling link, which must not be replaced
    if path.exists():
        if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
            return False
        raise RunError(f"{path} exists with other content; choose another name or delete it first")
    write_atomically(path, data)
    return True
