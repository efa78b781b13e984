"""ONNX Runtime for browsers, from npm. It is fetched when a demo is written; no copy is in this repository."""

import base64
import hashlib
import io
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from ..errors import ConfigError

PACKAGE = "onnxruntime-web@1.30.0"
SHA512 = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="  # as npm states it
# The plain WebAssembly build. The name of its script ends with .js: not every web host knows .mjs.
MEMBERS = {"page/ort.js": "package/dist/ort.wasm.bundle.min.mjs", "page/ort.wasm": "package/dist/ort-wasm-simd-threaded.wasm"}
_LARGEST_MEMBER, _SECONDS = 1 << 26, 600


def runtime_files() -> dict[str, bytes]:
    """Return the files of the runtime by their URL in the demo. Raises `ConfigError` without npm or a network."""
    return members(packed())


def packed() -> bytes:
    """Return the npm package as a checked archive, from npm's cache or its registry."""
    npm = shutil.which("npm")
    if npm is None:
        raise ConfigError(f"npm is not installed; --export fetches {PACKAGE} with it (Debian: apt-get install npm)")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", PACKAGE, "--prefer-offline", "--loglevel=error", "--pack-destination", folder]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"npm did not fetch {PACKAGE} ({error}); try again") from error
        archives = list(Path(folder).glob("*.tgz"))
        if done.returncode != 0 or len(archives) != 1:
            raise ConfigError(f"npm did not fetch {PACKAGE} ({_last_line(done.stderr)}); check the network and try again")
        return checked(archives[0].read_bytes())


def checked(archive: bytes) -> bytes:
    """Return the archive; raise `ConfigError` unless it is the one that this version of dpcert was tested with."""
    actual = base64.b64encode(hashlib.sha512(archive).digest()).decode()
    if actual != SHA512:
        raise ConfigError(f"{PACKAGE} has the SHA-512 {actual[:12]}…, expected {SHA512[:12]}…; clear npm's cache and try again")
    return archive


def members(archive: bytes) -> dict[str, bytes]:
    """Read the needed members; nothing is unpacked to disk."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as opened:
        for name, member in MEMBERS.items():
            content = opened.extractfile(member)
            if content is None:
                raise ConfigError(f"{PACKAGE} has no file {member}; clear npm's cache and try again")
            found[name] = content.read(_LARGEST_MEMBER)
    script = found["page/ort.js"]
    return found | {"page/ort.js": re.sub(rb"\n//# sourceMappingURL=\S*", b"", script)}  # the map is not in the demo


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
