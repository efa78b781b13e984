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
    "rounding": -1,
    "_validate": 0,
    "progress": 0,
    "sections": 1,
    "shapes": 0,
    "outputs": 1,
    "rng": 1,
    "workers": 1,
    "known_layers": -1,
    "operator_norm": -0.5,
    "tied": -1,
    "row_rules": 0,
    "row_proof": 1,
    "isolation": 2,
    "chains": 2.2,
    "interrupts": 1,
    "losses": 1,
    "input_gradients": 1,
    "store": 2,
    "scale": 2.5,  # writes logs through the store; certification uses the world
    "data": 3,
    "privacy": 3,
    "gradients": 3,
    "views": 3,
    "certification": 3,
    "models": 2.8,  # certification knows models with noise inside
    "analysis": 3,
    "attacks": 4,
    "methods": 4,
    "training": 5,
    "pretraining": 5,
    "runs": 7,
    "report": 6,
    "release": 8,
    "paper": 8,
    "tuning": 8,
    "serve": 8,
    "cli": 9,
    "__init__": 10,
    "__main__": 10,
}
# These import no file of their own folder, whatever else changes: each can be read, tested and audited alone.
PILLARS = (
    *("privacy/accounting", "privacy/clipping", "privacy/noise", "privacy/sampling", "privacy/selection"),
    *("gradients/engine", "gradients/parts"),
    *("certification/bank", "certification/bounds", "certification/sequence"),
    *("analysis/correlate", "analysis/input_gradient", "analysis/input_hessian", "analysis/layers", "analysis/lipschitz"),
    *("attacks/kinds", "attacks/norms"),
    *("data/arrays", "data/cifar", "data/fetch", "data/fingerprint", "data/idx"),
    *("models/check", "models/cnn", "models/resnet"),
    *("views/gaussian", "views/original", "views/smoothadv"),
    *("training/curve", "training/provenance", "training/step"),
    *("scale/environment", "scale/session", "scale/tasks"),
    "store/durable",
)
# A file may import files of its folder that import none of it themselves. These join more than that:
JOINTS = {
    "privacy/mechanism",  # the one step of the mechanism: all pillars and the ledger
    "privacy/statement",  # says in words what the ledger holds
    "gradients/layerwise",  # the layers' rules, which share the part sizes
    "gradients/traced",  # the same rules on the trace of a custom forward
    "gradients/checkpointed",  # the trace, one segment at a time
    "gradients/choose",  # all engines
    "certification/laws",  # the law's number from the bound, and its counters
    "certification/request",  # the law, the votes and the row they give
    "certification/votes",  # counts with the compiled graph and the bank
    "certification/sweep",  # votes to rows
    "data/registry",  # names to readers
    "data/items",  # checks the items of a map-style dataset with all readers and digests of records
    "data/dataset",  # every kind of data as one data set
    "models/architectures",  # names to networks
    "models/weights",  # weights into any of the networks
    "models/spec",  # network, weights and what trains
    "models/registry",  # the public function for a spec
    "training/phases",  # the settings of each phase
    "store/growing",  # rows that are appended
    "store/public",  # the files of a run directory as bytes
    "store/weights",  # a header that names the format of metrics.json
    "store/opened",  # all checks on the way from files to figures
    "training/loop",  # steps, state, curve
    "training/lifecycle",  # begins, resumes and ends a run: ledger, checkpoints, memory of what was seen
    "training/ranks",  # how other ranks follow what rank 0 has begun: its lifecycle and state
    "training/audit",  # trains with the loop
}
JOINED_FOLDERS = {
    "runs",
    "pretraining",
    "report",
    "release",
    "paper",
    "tuning",
    "cli",
    "scale",
    "serve",
}  # nothing but joints; cycles are refused there too


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


def siblings(path: Path) -> set[str]:
    """The files of its own folder that a file imports."""
    here = name_of(path)
    found = {name.removeprefix("dpcert/") for name in own_imports(path)}
    return {name for name in found if "/" in here and "/" in name and folder(name) == folder(here)}


SIBLINGS = {name_of(path): siblings(path) for path in FILES if not name_of(path).endswith("__init__")}


@pytest.mark.parametrize("name", PILLARS)
def test_pillars_import_no_sibling(name):
    assert not SIBLINGS[name], f"{name} imports {SIBLINGS[name]}"


@pytest.mark.parametrize("name", SIBLINGS)
def test_files_join_leaves_of_their_folder_only(name):
    if name not in JOINTS and folder(name) not in JOINED_FOLDERS:
        joints = {other for other in SIBLINGS[name] if SIBLINGS.get(other)}
        assert not joints, f"{name} imports {joints}, which import files of the folder too; list it as a joint, with a reason"


def test_no_exception_is_listed_in_vain():
    """A joint that joins no more, or is gone, leaves the list: it gets shorter."""
    needed = {name for name, others in SIBLINGS.items() if any(SIBLINGS.get(other) for other in others)}
    assert not JOINTS - needed and len(JOINTS) < 28
    assert set(RANK) >= {folder(name_of(path)) for path in FILES} and not set(RANK) - {folder(name_of(path)) for path in FILES}


def test_nothing_but_the_command_line_knows_the_paper():
    """What exists only to compare with one paper can be left out: a report is given its figures by a function."""
    for path in FILES:
        if folder(name_of(path)) not in {"paper", "cli"}:
            assert "paper" not in {folder(name) for name in own_imports(path)}, path
            assert not any(name.startswith("dpcert.paper") for name in imports(path)), path


def test_certification_knows_neither_privacy_nor_training():
    for path in (SOURCE / "certification").glob("*.py"):
        assert not {"privacy", "training", "runs"} & {folder(name) for name in own_imports(path)}, path


def test_report_reads_the_store_only():
    """And computes with modules without torch, so that a figure on a page is computed as the command computes it.

    The statement and its trade-off turn the ledger into the bound on membership attacks, which `run.statement` prints too.
    """
    figures = {
        "dpcert/certification/metrics",
        "dpcert/analysis/correlate",
        "dpcert/privacy/statement",
        "dpcert/privacy/tradeoff",
    }
    for path in (SOURCE / "report").glob("*.py"):
        for name in own_imports(path):
            low = folder(name) in {"report", "store", "errors", "rounding"}
            assert low or name in figures, (path, name)


@pytest.mark.parametrize(
    "module",
    [
        "dpcert.privacy.accounting",
        "dpcert.privacy.tradeoff",
        "dpcert.certification.bounds",
        "dpcert.store.runs",
        "dpcert.store.records",
        "dpcert.analysis.correlate",
        "dpcert.report.tables",
        "dpcert.report.html",
        "dpcert.paper.comparison",
        "dpcert.paper.reproduction",
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

    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail, name])
        for other in edges.get(name, set()) - done:
            visit(other, (*trail, name))
        done.add(name)  # no cycle goes through it

    for name in edges:
        visit(name, ())


def test_the_door_is_small():
    import dpcert

    assert len(dpcert.__all__) <= 15
    assert all(getattr(dpcert, name) is not None for name in dpcert.__all__)
