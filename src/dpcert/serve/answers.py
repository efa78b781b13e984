"""What the service answers, as JSON."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

Nested = list[list[list[float]]]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, protected_namespaces=())

    def content(self) -> dict[str, Any]:
        """The JSON object."""
        return self.model_dump(by_alias=True)


class Prediction(_Answer):
    """A certificate: the smoothed classifier predicts `class` for every image closer than `radius` (L2) to this one.

    The probability that this is wrong is at most alpha, over the noise of this answer. `class` is -1 and `radius` 0 if it
    abstained. `votes` are the n votes of the estimate by class; a vote may count for no class.
    """

    predicted: int = Field(alias="class", ge=-1)
    radius: float = Field(ge=0)
    abstained: bool
    votes: list[int]
    n0: int
    n: int
    alpha: float
    sigma: float
    dtype: str
    model_sha256: str


class Noisy(_Answer):
    """Noisy copies of an image, clipped for display, and the class that the base model predicts for each (-1: none)."""

    sigma: float
    images: list[str]
    classes: list[int]
    model_sha256: str


class Attacked(_Answer):
    """An image within `strength` (L2) of the given one that an attack found. `base_class` is the base model's class of it."""

    image: Nested
    png: str
    strength: float
    distance: float
    target: str
    label: int
    base_class: int
    base_class_before: int
    model_sha256: str


class Thumbnail(_Answer):
    """A test image."""

    index: int
    label: int
    png: str


class GalleryPage(_Answer):
    """Some of the test images."""

    total: int
    start: int
    items: list[Thumbnail]


class GalleryImage(Thumbnail):
    """A test image with its values."""

    image: Nested


class Privacy(_Answer):
    """The privacy statement of the run. `epsilon` is null if it is not private."""

    private: bool
    reason: str | None
    epsilon: float | None
    delta: float
    relation: str
    statement: str
    sentences: list[str]


class Certified(_Answer):
    """Certified accuracy of the run on its test set."""

    sigma: float
    n0: int
    n: int
    alpha: float
    examples: int
    acr: float
    certified_accuracy: dict[str, float]
    abstained: float


class Model(_Answer):
    """The model that answers."""

    dataset: str
    method: str
    input_shape: list[int]
    classes: int
    class_names: list[str] | None
    sigma: float
    n0: int
    n: int
    alpha: float
    dtype: str
    model_sha256: str
    largest_radius: float
    clean_accuracy: float | None
    privacy: Privacy
    certification: list[Certified]
    gallery: bool


class Health(_Answer):
    """`model_file` compares the file on disk with the loaded model: same, changed or missing. The loaded model answers."""

    status: str
    model_sha256: str
    model_file: str


class Problem(_Answer):
    """What is wrong, the value, and the remedy, in one line."""

    error: str
