"""The import rules of the layout: leaves know no siblings, maths knows no input or output, nothing goes up or round."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "dpcert"
FILES = sorted(SOURCE.rglob("*.py"))
# A folder may import from folders of a lower rank, and from its own.
RANK = {
    "errors": -1,
    "published": -1,
    "rounding": -1,
    "_validate": 0,
    "progress": 0,
    "shapes": 0,
    "outputs": 1,
    "rng": 1,
    "workers": 1,
    "isolation": 1,
    "interrupts": 1,
    "losses": 1,
    "input_gradients": 1,
    "store": 2,
    "data": 3,
    "privacy": 3,
    "gradients": 3,
    "views": 3,
    "certification": 3,
    "models": 3,
    "analysis": 3,
    "attacks": 4,
    "methods": 4,
    "training": 5,
    "pretraining": 5,
    "runs": 7,
    "report": 6,
    "release": 8,
    "cli": 9,
    "__init__": 10,
    "__main__": 10,
}
JOINTS = {
    "privacy/mechanism",
    "privacy/audit",
    "privacy/statement",
    "privacy/ledger",
    "training/curve",
    "training/loop",
    "training/audit",
    "training/step",
    "training/state",
    "training/provenance",
    "analysis/examples",
    "attacks/measure",
    "certification/smooth",
    "certification/sweep",
    "certification/metrics",
    "certification/votes",
    "certification/bank",
    "certification/compiled",
    "gradients/vmap",
    "gradients/layerwise",
    "gradients/layers",
    "gradients/choose",
    "data/registry",
    "data/dataset",
    "models/registry",
    "store/runs",
    "store/growing",
    "store/records",
    "store/metrics",
    "store/chain",
    "store/weights",
    "store/public",
    "store/opened",
}
JOINED_FOLDERS = ("runs", "pretraining", "report", "release", "cli")


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").as_posix()


def imports(path: Path, *, top_only: bool = False) -> list[str]:
    """Names of imported modules: ``numpy``, or ``dpcert/privacy/noise`` for our own."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_only else list(ast.walk(tree))
    package = path.relative_to(SOURCE).parent.parts
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                found.append(node.module or "")
                continue
            base = package[: len(package) - (node.level - 1)]
            module = [*base, *(node.module.split(".") if node.module else [])]
            inner = ["/".join(["dpcert", *module, alias.name]) for alias in node.names]
            exact = [name for name in inner if (SOURCE.parent / f"{name}.py").exists() or (SOURCE.parent / name).is_dir()]
            found += exact or ["/".join(["dpcert", *module])]
    return found


def folder(name: str) -> str:
    return name.removeprefix("dpcert/").split("/")[0]


def own_imports(path: Path) -> list[str]:
    return [name for name in imports(path) if name.startswith("dpcert/")]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_down(path):
    here = folder(name_of(path))
    for name in own_imports(path):
        there = folder(name)
        assert there == here or RANK[there] < RANK[here], f"{name_of(path)} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_leaves_import_no_sibling(path):
    name = name_of(path)
    if "/" not in name or name in JOINTS or name.endswith("__init__") or name.startswith(JOINED_FOLDERS):
        return
    siblings = [other for other in own_imports(path) if folder(other) == folder(name) and "/" in other.removeprefix("dpcert/")]
    allowed = {"dpcert/models/cnn", "dpcert/gradients/engine", "dpcert/gradients/parts"}
    assert not set(siblings) - allowed, f"leaf {name} imports {siblings}"


def test_certification_knows_neither_privacy_nor_training():
    for path in (SOURCE / "certification").glob("*.py"):
        assert not {"privacy", "training", "runs"} & {folder(name) for name in own_imports(path)}, path


def test_report_reads_the_store_only():
    """And computes with two modules of plain NumPy, so that a figure on a page is computed as the command computes it."""
    figures = {"dpcert/certification/metrics", "dpcert/analysis/correlate"}
    for path in (SOURCE / "report").glob("*.py"):
        for name in own_imports(path):
            low = folder(name) in {"report", "store", "errors", "published", "rounding"}
            assert low or name in figures, (path, name)


@pytest.mark.parametrize(
    "module",
    [
        "dpcert.privacy.accounting",
        "dpcert.certification.bounds",
        "dpcert.store.runs",
        "dpcert.store.records",
        "dpcert.analysis.correlate",
        "dpcert.report.tables",
        "dpcert.report.html",
        "dpcert.cli.app",
    ],
)
def test_torch_is_not_imported_by(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_pickle_and_no_eval_anywhere():
    for path in FILES:
        tree = ast.parse(path.read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not {"eval", "exec", "__import__"} & names, path
        assert not any(name.split(".")[0] in {"pickle", "shelve", "joblib", "dill"} for name in imports(path)), path
        calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert "torch.load" not in calls, path


def test_no_cycles():
    edges = {f"dpcert/{name_of(path)}": set(own_imports(path)) for path in FILES if not name_of(path).endswith("__init__")}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail, name])
        for other in edges.get(name, ()):
            visit(other, (*trail, name))

    for name in edges:
        visit(name, ())


def test_the_door_is_small():
    import dpcert

    assert len(dpcert.__all__) <= 15
    assert all(getattr(dpcert, name) is not None for name in dpcert.__all__)
