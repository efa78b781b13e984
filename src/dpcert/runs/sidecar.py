"""Sidecars: a small JSON file next to a row file records its settings, so that rows of different requests never mix."""

from pathlib import Path
from typing import Any

from ..errors import RunError
from ..store.durable import read_checked_json, write_checked_json


def check_or_write_sidecar(rows: Path, facts: dict[str, Any]) -> None:
    """Write `facts` to the sidecar of `rows`, or raise if they differ from those recorded; new facts are added."""
    recorded = recorded_facts(rows) or {}
    differ = [f"{name}: {recorded[name]} -> {facts[name]}" for name in facts if recorded.get(name, facts[name]) != facts[name]]
    if not differ and facts.keys() - recorded.keys():
        write_checked_json(_sidecar(rows), {**recorded, **facts})
    if differ:
        raise RunError(
            f"{rows} was computed with other settings ({'; '.join(differ)}); use the same settings or {_delete(rows)}"
        )


def recorded_facts(rows: Path) -> dict[str, Any] | None:
    """The facts in the sidecar of `rows`; None if there are no rows yet, so any settings may be used."""
    sidecar = _sidecar(rows)
    if not rows.exists():
        return None
    if not sidecar.exists():
        raise RunError(f"{rows} has no {sidecar.name}, which records its settings; {_delete(rows)}")
    return read_checked_json(sidecar, what="request", remedy=_delete(rows))


def _sidecar(rows: Path) -> Path:
    return rows.with_suffix(".json")


def _delete(rows: Path) -> str:
    return f"delete {rows.name} and {_sidecar(rows).name} to start over"
