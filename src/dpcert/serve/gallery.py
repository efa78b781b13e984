"""Test images to try the service with: those of public data sets, unless the user asks for others; no training records."""

import torch
from torch import Tensor

from ..errors import DpcertError
from ..report.pictures import as_data_url
from ..runs.images import unavailable
from ..runs.open import OpenRun
from .answers import GalleryImage, GalleryPage, Thumbnail


class Gallery:
    """The test images of a run with their labels."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._y)

    def page(self, start: int, count: int) -> GalleryPage:
        """Images from `start` on, at most `count`."""
        numbers = range(start, min(start + count, len(self)))
        return GalleryPage(total=len(self), start=start, items=[self._thumbnail(number) for number in numbers])

    def image(self, index: int) -> GalleryImage:
        """One image with its values."""
        return GalleryImage(**self._thumbnail(index).content(), image=self._x[index].tolist())

    def _thumbnail(self, index: int) -> Thumbnail:
        return Thumbnail(index=index, label=int(self._y[index]), png=as_data_url(self._x[index].numpy()))


def gallery_of(run: OpenRun, wanted: bool | None) -> Gallery | str:
    """The test images of the run, or why there are none. Downloads nothing.

    Without `wanted`, custom data are not shown: epsilon says nothing about their test images, which may be private.
    """
    if wanted is False:
        return "the gallery is switched off"
    if wanted is None and (run.config.data.path or run.has_given_data):
        return "the data of this run are custom, and may be private; to show their test images, start with --gallery"
    why = None if run.has_given_data else unavailable(run.config)
    if why is not None:
        return why
    try:
        data = run.data
    except DpcertError as error:
        return "the data set on this machine cannot be read" if wanted is None else str(error)
    return Gallery(data.x_test, torch.as_tensor(data.y_test))
