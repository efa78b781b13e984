"""Dockerfile, compose.yaml and the systemd unit: every file, extra and option that they name exists. No engine is needed."""

import configparser
import fnmatch
import inspect
import json
import re
import shlex
import tomllib

import typer
import yaml

from dpcert.cli import serve as command
from dpcert.serve.settings import Limits
from tests.serve.client import ROOT

OPTIONS = {
    f"--{name.replace('_', '-')}"
    for name, value in inspect.signature(command.serve).parameters.items()
    if any(isinstance(part, typer.models.OptionInfo) for part in value.annotation.__metadata__)
}
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
GUIDE = (ROOT / "docs" / "how-to" / "serve.md").read_text()


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.M)


def options_of(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def test_the_image_copies_what_exists_and_what_is_not_ignored():
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [source for line in instructions("COPY") for source in line.split()[:-1]]
    assert set(copied) == set(kept) and all((ROOT / source).exists() for source in copied)
    assert (ROOT / ".dockerignore").read_text().splitlines()[0] == "*"  # runs, keys and git stay outside


def test_the_image_installs_extras_that_exist_and_everything_the_package_needs_to_build():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"\.\[([a-z,]+)\]", " ".join(instructions("RUN")))
    assert set(extras.split(",")) <= set(project["optional-dependencies"]) and "serve" in extras
    copied = " ".join(instructions("COPY"))
    assert project["readme"] in copied and all(
        any(fnmatch.fnmatch(file, name) for file in copied.split()) for name in project["license-files"]
    )
    (base,) = instructions("FROM")
    assert re.fullmatch(r"python:3\.1[1-9]-slim", base)


def test_the_image_starts_the_service_as_another_user_than_root():
    (words,) = map(json.loads, instructions("ENTRYPOINT"))
    assert words[:2] == ["dpcert", "serve"] and options_of(words) <= OPTIONS
    assert instructions("USER") == ["dpcert"] and words[words.index("--port") + 1] == instructions("EXPOSE")[0]
    (check,) = re.findall(r"CMD (\[.*\])", DOCKERFILE)
    code = json.loads(check)[2]
    compile(code, "healthcheck", "exec")
    assert f":{instructions('EXPOSE')[0]}/health" in code


def test_compose_keeps_the_service_on_this_machine_behind_a_key():
    (service,) = COMPOSE["services"].values()
    assert options_of(service["command"]) <= OPTIONS and "--api-key-file" in service["command"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"]) and service["read_only"]
    assert all(volume.endswith(":/model:ro") for volume in service["volumes"])
    (name,) = service["secrets"]
    assert f"/run/secrets/{name}" in service["command"] and COMPOSE["secrets"][name]["file"] == "./api-key.txt"
    assert "/api-key.txt" in (ROOT / ".gitignore").read_text().splitlines()
    assert int(service["stop_grace_period"].removesuffix("s")) > Limits().grace_seconds


def test_the_unit_is_one_and_its_command_exists():
    (text,) = re.findall(r"```ini\n(.*?)```", GUIDE, re.S)
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str
    unit.read_string(text)
    words = shlex.split(unit["Service"]["ExecStart"])
    assert words[1] == "serve" and options_of(words) <= OPTIONS
    assert unit["Service"]["SuccessExitStatus"] == "130" and int(unit["Service"]["TimeoutStopSec"]) > Limits().grace_seconds
    assert unit["Service"]["LoadCredential"].split(":")[0] in unit["Service"]["ExecStart"]


def test_the_guide_names_the_limits_and_statuses_that_hold():
    from dpcert.serve.app import _STATUS

    documented = {int(number) for row in re.findall(r"^\| ([\d, ]+) \|", GUIDE, re.M) for number in row.split(",")}
    assert documented == {*_STATUS, 403, 405}
    limits = Limits()
    assert f"({limits.queue})" in GUIDE and f"({limits.seconds:g} seconds)" in GUIDE and limits.most_body_bytes(784) == 1 << 20
