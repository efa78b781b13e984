"""The small file beside rows that says how they were made; rows of another request are not mixed with them."""

from pathlib import Path
from typing import Any

from ..errors import RunError
from ..store.durable import read_checked_json, write_checked_json


def check_or_write_sidecar(rows: Path, facts: dict[str, Any]) -> None:
    """Write `facts` beside `rows`, or raise unless they say the same already; a fact of a new kind is added."""
    recorded = recorded_facts(rows) or {}
    differ = [f"{name}: {recorded[name]} -> {facts[name]}" for name in facts if recorded.get(name, facts[name]) != facts[name]]
    if not differ and facts.keys() - recorded.keys():
        write_checked_json(_beside(rows), {**recorded, **facts})
    if differ:
        raise RunError(f"{rows} was made with another request ({'; '.join(differ)}); give the same again or {_delete(rows)}")


def recorded_facts(rows: Path) -> dict[str, Any] | None:
    """What stands beside `rows`; None where there are no rows yet, so that nothing has to be held to."""
    beside = _beside(rows)
    if not rows.exists():
        return None
    if not beside.exists():
        raise RunError(f"{rows} has no {beside.name} beside it, which says how it was made; {_delete(rows)}")
    return read_checked_json(beside, what="request", remedy=_delete(rows))


def _beside(rows: Path) -> Path:
    return rows.with_suffix(".json")


def _delete(rows: Path) -> str:
    return f"delete {rows.name} and {_beside(rows).name} to begin anew"
