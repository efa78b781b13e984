"""The command lines of docs/scale.md are understood by torchrun and by dpcert."""

import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml
from torch.distributed.run import get_args_parser

from dpcert.cli.app import app

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text().replace("\\\n", "")  # long lines go on


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def command_lines() -> list[list[str]]:
    shown = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    lines = [line for line in shown if not line.startswith("pip ")]
    lines += [line.removeprefix("srun ") for block in blocks("bash") for line in block.splitlines() if line.startswith("srun ")]
    words = [shlex.split(line, comments=True) for line in lines]
    containers = [c for block in blocks("yaml") for c in yaml.safe_load(block)["spec"]["template"]["spec"]["containers"]]
    return words + [container["command"] for container in containers]


LINES = command_lines()


def parsed(words: list[str]):
    """Parse the arguments of ``dpcert`` without running the command; an unknown option raises."""
    group = typer.main.get_command(app)
    with group.make_context("dpcert", list(words), resilient_parsing=False) as context:
        _, command, rest = group.resolve_command(context, context._protected_args + context.args)
        return command.make_context(command.name, rest, parent=context)


def test_the_page_has_lines_for_one_machine_slurm_and_kubernetes():
    assert len(LINES) >= 5 and sum(words[0] == "torchrun" for words in LINES) >= 4
    assert any("SLURM_JOB_NODELIST" in block for block in blocks("bash")) and len(blocks("yaml")) == 1


@pytest.mark.parametrize("words", LINES, ids=lambda words: " ".join(words)[:60])
def test_the_line_is_understood(words):
    if words[0] == "torchrun":
        asked = get_args_parser().parse_args(words[1:])
        assert asked.module and asked.training_script == "dpcert" and asked.nproc_per_node == "8"
        words = ["dpcert", *asked.training_script_args]
    assert words[0] == "dpcert"
    parsed(words[1:])


def test_a_wrong_line_is_not():
    """The twin."""
    with pytest.raises(typer.TyperException):
        parsed(["train", "--no-such-option"])
    with pytest.raises(SystemExit):
        get_args_parser().parse_args(["--nproc-per-gpu", "8", "-m", "dpcert"])


def test_both_machines_of_a_job_are_told_the_same_number():
    job = yaml.safe_load(blocks("yaml")[0])["spec"]
    command = job["template"]["spec"]["containers"][0]["command"]
    assert job["completions"] == job["parallelism"] == int(command[command.index("--nnodes") + 1])
    (slurm,) = blocks("bash")
    assert re.search(r"--nodes=2\b", slurm) and "--nnodes 2 " in slurm
