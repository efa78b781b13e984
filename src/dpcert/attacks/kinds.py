"""The attacks (FGSM and PGD) by name, with their settings."""

from dataclasses import dataclass

from .._validate import finite_in, integer_in, one_of
from ..errors import ConfigError

LINF, L2 = "linf", "l2"
STRENGTHS = {
    "fgsm": (0.0005, 0.01, 0.1, 0.5, 1.0),  # as in the paper
    "pgd-linf": (0.01, 0.05, 0.1, 0.2, 0.3),
    "pgd-l2": (0.25, 0.5, 0.75, 1.0, 1.25, 1.5),  # radii at which certified accuracy is shown
}
_NORMS = {"fgsm": LINF, "pgd-linf": LINF, "pgd-l2": L2}
_MOST_STRENGTH = 1e3


@dataclass(frozen=True)
class Attack:
    """Gradient ascent on the loss of the true label, in a ball around the image.

    `fgsm` (Goodfellow et al. 2015): one step of full strength along the gradient's sign, from the image itself.
    `pgd-linf`, `pgd-l2` (Madry et al. 2018): `steps` steps of 2.5 strength / steps from a random point of the ball, so
    that every point of the ball is reachable from every other; the best of `starts` starts counts for each image.
    """

    name: str
    steps: int = 20
    starts: int = 2

    def __post_init__(self) -> None:
        one_of("attack", self.name, _NORMS)
        integer_in("--steps", self.steps, 1, 10_000, remedy="20 is typical")
        integer_in("--starts", self.starts, 1, 100, remedy="2 is typical")
        if self.is_single and (self.steps, self.starts) != (1, 1):
            raise ConfigError(f"--steps and --starts are {self.steps} and {self.starts}, fgsm takes one step; use pgd-linf")

    @property
    def is_single(self) -> bool:
        """Whether the attack is one step from the image itself."""
        return self.name == "fgsm"

    @property
    def norm(self) -> str:
        """The norm of the ball: "linf" or "l2"."""
        return _NORMS[self.name]

    def step(self, strength: float) -> float:
        """Return the length of a step."""
        return strength if self.is_single else 2.5 * strength / self.steps


def attack(name: str, steps: int | None = None, starts: int | None = None) -> Attack:
    """Return the attack called `name`, with default settings where none are given."""
    single = name == "fgsm"
    return Attack(name, (1 if single else 20) if steps is None else steps, (1 if single else 2) if starts is None else starts)


def check_strength(strength: float) -> float:
    """Refuse an invalid strength."""
    return finite_in("--strengths", strength, 0.0, _MOST_STRENGTH, remedy="in pixel units of images in [0, 1]")
