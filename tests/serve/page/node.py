"""Run the page's JavaScript modules in Node and get JSON back."""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from dpcert.serve.pages import page_files

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="no Node.js on this machine (Debian: apt-get install nodejs)")


def in_node(script: str, given: object = None, changed: dict[str, tuple[str, str]] | None = None) -> object:
    """What `script`, the body of an async function of `given`, returns; `changed` replaces text in modules (for twins)."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "package.json").write_text('{"type": "module"}')
        for name, file in page_files().items():
            if name.endswith(".js"):
                old, new = (changed or {}).get(name, ("", ""))
                text = file.content.decode()
                assert old in text
                (home / name).write_text(text.replace(old, new, 1) if old else text)
        (home / "given.json").write_text(json.dumps(given))
        (home / "run.js").write_text(
            'import fs from "node:fs";\nconst given = JSON.parse(fs.readFileSync(new URL("given.json", import.meta.url)));\n'
            f"const work = async (given) => {{\n{script}\n}};\nconsole.log(JSON.stringify(await work(given)));\n"
        )
        done = subprocess.run([str(NODE), str(home / "run.js")], capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
