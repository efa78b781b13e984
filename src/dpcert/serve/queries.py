"""What a request may ask for in its query. An unknown or ill-typed key is an error."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Query(BaseModel):
    model_config = ConfigDict(extra="forbid")


class VoteQuery(_Query):
    """How many votes, and the probability of a wrong certificate; both default to the settings of the service."""

    n: int | None = Field(None, ge=1, le=10**9)
    alpha: float | None = Field(None, gt=0, lt=0.5)


class NoisyQuery(_Query):
    """How many noisy copies."""

    count: int = Field(4, ge=1, le=16)


class AttackQuery(_Query):
    """How far to move the image (L2), against which classifier, and away from which class (default: the predicted one)."""

    strength: float = Field(ge=0, le=10)
    target: Literal["smoothed", "base"] = "smoothed"
    label: int | None = Field(None, ge=0)


class GalleryQuery(_Query):
    """Which test images."""

    start: int = Field(0, ge=0, le=10**9)
    count: int = Field(24, ge=1, le=100)
