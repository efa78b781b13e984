"""Sections of settings: typed, frozen groups of keys, with uniform error messages."""

from collections.abc import Collection, Mapping
from typing import Any, Final, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo
from pydantic_core import PydanticCustomError

from ._validate import shown
from .errors import ConfigError

LARGEST: Final = 2**53  # integers up to this are exact in every format that stores them
OPTIONAL: Final = "optional"  # marks a key that config files leave out at its default: older configs keep their bytes
SPEED_ONLY: Final = "speed only"  # marks a key that may change between two starts of the same run


class Section(BaseModel):
    """A group of keys. Unknown keys and values of the wrong type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def keys_marked(cls, mark: str) -> set[str]:
        """Return the keys whose annotation has `mark`."""
        return {key for key, field in cls.model_fields.items() if mark in field.metadata}

    def stated(self) -> dict[str, Any]:
        """Return what a config file contains: keys with a value, without `OPTIONAL` ones at their default."""
        values = self.model_dump(exclude_none=True)
        unset = {key for key in self.keys_marked(OPTIONAL) if values.get(key) == type(self).model_fields[key].default}
        return {key: value for key, value in values.items() if key not in unset}


def name_in(known: Collection[str]) -> AfterValidator:
    """Accept only the names in `known`, a table that defines them."""

    def check(value: str) -> str:
        if value not in known:
            *others, last = (f"'{name}'" for name in known)
            raise PydanticCustomError("unknown_name", "input should be {names}", {"names": f"{', '.join(others)} or {last}"})
        return value

    return AfterValidator(check)


def used_by(choice: str, **defaults: float) -> BeforeValidator:
    """Validate a key that only some values of the key `choice` use, each with its default; refuse it for other values.

    `choice` must be declared before the key, and the field needs ``validate_default=True``.
    """

    def resolve(value: Any, info: ValidationInfo) -> Any:
        chosen = info.data.get(choice)  # missing if it is itself invalid, which is the error to report
        if chosen in defaults:
            return defaults[chosen] if value is None else value
        if value is not None and chosen is not None:
            users = " or ".join(f"{choice} = {name}" for name in defaults)
            words = "only {users} uses it, and {choice} is {chosen}; leave it out or choose one that uses it"
            raise PydanticCustomError("unused_key", words, {"users": users, "choice": choice, "chosen": chosen})
        return value

    return BeforeValidator(resolve)


S = TypeVar("S", bound=Section)


def validated(kind: type[S], tables: Mapping[str, Any], origin: str) -> S:
    """Build a section (of sections) from plain values; the first error is reported with its key."""
    try:
        return kind.model_validate(tables)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if not str(part).startswith("constrained-"))
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"{origin}: unknown key {shown(key)}; {_known(kind, key)}") from error
        raise ConfigError(f"{origin}: {key} is {shown(first.get('input'))}: {first['msg'].lower()}") from error


def _known(kind: type[Section], key: str) -> str:
    section = key.split(".")[0]
    if "." in key and section in kind.model_fields:
        annotation = kind.model_fields[section].annotation
        assert isinstance(annotation, type) and issubclass(annotation, Section)
        return f"[{section}] has: {', '.join(annotation.model_fields)}"
    return f"the sections are: {', '.join(kind.model_fields)}"
