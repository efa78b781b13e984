"""S4: over all keys, a wrong type or a typo is an error that names the key; nothing is evaluated or imported by name."""

import datetime
import sys
import types
import typing
from pathlib import Path

import pytest

from dpcert.errors import ConfigError, DpcertError
from dpcert.models.registry import build_model
from dpcert.runs.config import Config, parse, parse_assignment, read_toml
from dpcert.runs.resolve import resolve
from tests.security.guards import watched

KEYS = {
    f"{section}.{key}": field.annotation
    for section, table in Config.model_fields.items()
    for key, field in table.annotation.model_fields.items()
}
SAMPLES = {
    bool: (True,),
    int: (3,),
    float: (0.7, float("nan"), float("inf")),
    str: ("words", ""),
    list: ([], [1]),
    dict: ({}, {"a": 1}),
    datetime.date: (datetime.date(2024, 1, 1),),
}


def kinds_of(annotation: object) -> set[type]:
    """The Python types a key takes: ``int | Literal["all"] | None`` -> {int, str, NoneType}."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return set().union(*(kinds_of(part) for part in typing.get_args(annotation)))
    if typing.get_origin(annotation) is typing.Literal:
        return {type(word) for word in typing.get_args(annotation)}
    return {annotation} if isinstance(annotation, type) else set()


def wrong_values(annotation: object) -> list[object]:
    taken = kinds_of(annotation)
    taken |= {int} if float in taken else set()  # 3 is a float, too
    return [value for kind, values in SAMPLES.items() if kind not in taken for value in values]


def text_of(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {part}" for key, part in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else str(value)


def typos(key: str) -> set[str]:
    """Neighbours of a name: a letter dropped, doubled, swapped, added; other case; a hyphen; a plural."""
    found = {key[:i] + key[i + 1 :] for i in range(len(key))} | {key[:i] + key[i] + key[i:] for i in range(len(key))}
    found |= {key[:i] + key[i + 1] + key[i] + key[i + 2 :] for i in range(len(key) - 1)}
    return (found | {key.upper(), key + "s", key + "_", "_" + key, key.replace("_", "-"), key + " "}) - {key, ""}


def refused(key: str, value: object, tmp_path: Path | None) -> str:
    """The words of the refusal, by an assignment or (with a folder) by a TOML file."""
    with pytest.raises(ConfigError) as caught:
        if tmp_path is None:
            resolve(None, {key: value})
        else:
            section, name = key.split(".", 1)
            path = tmp_path / "c.toml"
            path.write_text(f'[{section}]\n"{name}" = {text_of(value)}\n', encoding="utf-8")
            parse(read_toml(path), "c.toml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_key_refuses_every_wrong_type_and_typo_by_name(tmp_path, evidence):
    known, trials = set(KEYS), 0
    for key, annotation in KEYS.items():
        for value in wrong_values(annotation):
            for folder in (None, tmp_path):
                assert key in refused(key, value, folder), (key, value)
                trials += 1
        section, name = key.split(".")
        for typo in sorted(typos(name)):
            if f"{section}.{typo}" not in known:
                for folder in (None, tmp_path):
                    assert repr(f"{section}.{typo}") in refused(f"{section}.{typo}", 1, folder)
                    trials += 1
        for typo in sorted(typos(section) - set(Config.model_fields)):
            assert repr(typo) in refused(f"{typo}.{name}", 1, None)
            trials += 1
    assert len(KEYS) >= 45 and trials > 3000
    evidence("S4", figure=f"{trials} of {trials} wrong types and typos over {len(KEYS)} keys refused by name", trials=trials,
             twin="a section that takes any key, a key that takes any value: caught")  # fmt: skip


def test_a_section_that_is_no_table_is_named():
    for section in Config.model_fields:
        for value in (1, "x", [], None, True):
            with pytest.raises(ConfigError, match=section):
                parse({section: value}, "x")


@pytest.mark.parametrize("extra", ["forbid", "ignore"])
def test_twin_a_section_that_takes_any_key_is_caught(extra, monkeypatch):
    from pydantic import BaseModel, ConfigDict

    class Section(BaseModel):
        model_config = ConfigDict(extra=extra, strict=True)
        epochs: float = 1

    if extra == "ignore":
        Section.model_validate({"epoch": 1})  # the fault itself: silence
    else:
        with pytest.raises(ValueError, match="epoch"):
            Section.model_validate({"epoch": 1})
    loose = type("Loose", (BaseModel,), {"__annotations__": {"epochs": float}, "epochs": 1})
    assert loose.model_validate({"epochs": "3"}).epochs == 3.0  # the other fault: a text taken for a number


CODE = (
    "__import__('os').system('true')",
    "os:system",
    "antigravity",
    "antigravity.geohash",
    "antigravity:geohash",
    "${jndi:ldap://x}",
    "{{7*7}}",
    "%(x)s",
    "$(true)",
    "`true`",
    "!!python/object/apply:os.system ['true']",
    "lambda: 1",
    "../../etc/passwd",
)


def test_no_value_is_evaluated_or_imported():
    """Names are looked up in tables, never imported; text is data."""
    texts = [key for key, annotation in KEYS.items() if str in kinds_of(annotation)]
    assert {"data.name", "data.path", "model.name", "method.name", "method.views", "train.device"} <= set(texts)
    before = set(sys.modules)
    with watched() as seen:
        for key in texts:
            for code in CODE:
                name, value = parse_assignment(f"{key}={code}")
                try:
                    config = resolve(None, {name: value})
                    config.build_method()
                    build_model(config.model.name)
                    config.to_toml()
                except DpcertError:
                    pass
    assert not seen and not {"antigravity", "this"} & (set(sys.modules) - before)


def test_numbers_of_thousands_of_digits_and_deep_lists_are_refused_in_a_line(tmp_path):
    path = tmp_path / "c.toml"
    for text in ("0x" + "f" * 5000, "9" * 5000, "[" * 900 + "]" * 900, "[" * 5000, "1e999999", '"' + "x" * 100_000 + '"'):
        path.write_text(f"[train]\nepochs = {text}\n")
        with pytest.raises(ConfigError) as caught:
            parse(read_toml(path), "c.toml")
        assert len(str(caught.value)) < 1000
        with pytest.raises(ConfigError):
            resolve(None, dict([parse_assignment(f"train.epochs={text}")]))
    path.write_text("#" * (1 << 19))
    with pytest.raises(ConfigError, match="bytes"):
        read_toml(path)
