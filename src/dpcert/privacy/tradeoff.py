"""What epsilon means: how often the best possible membership attack can detect one record.

An attacker knows the released weights, all other training records and all public settings, and decides whether one given
record was used. False-positive rate: how often it says yes although the record was not used. True-positive rate: how often
it says yes when the record was used.

Guarantee: if training is (epsilon, delta(epsilon))-private for adding and for removing a record, every attack satisfies

    TPR <= e^epsilon FPR + delta(epsilon)    and    1 - FPR <= e^epsilon (1 - TPR) + delta(epsilon)

for any epsilon >= 0 (Wasserman and Zhou 2010; Kairouz et al. 2015). The curve is the smallest of all these bounds. They also
hold for an attack that raises an alarm when the record is missing.
Assumes: one record per person. A person with several records is less protected.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .._validate import finite_in
from ..rounding import ceil_text

FALSE_ALARMS = 0.01  # the false-positive rate that the sentence quotes
_NOTHING = "100.00"


@dataclass(frozen=True, eq=False)
class TradeOff:
    """An upper bound on the true-positive rate of every membership attack, by false-positive rate.

    `epsilons` and `deltas` are what `accounting.privacy_profile` returns.
    """

    epsilons: np.ndarray
    deltas: np.ndarray

    @property
    def mark(self) -> tuple[float, float]:
        """The false-positive rate that the sentence quotes, and the bound at that rate."""
        return FALSE_ALARMS, self.true_positive_rate(FALSE_ALARMS)

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """Bound the true-positive rate of any attack at this false-positive rate."""
        finite_in("false_positive_rate", false_positive_rate, 0.0, 1.0)
        return float(self.true_positive_rates([false_positive_rate])[0])

    def true_positive_rates(self, false_positive_rates: Sequence[float] | np.ndarray) -> np.ndarray:
        """Return `true_positive_rate` for each rate."""
        rates = np.asarray(false_positive_rates, dtype=np.float64)[None, :]
        epsilons, deltas = self.epsilons[:, None], self.deltas[:, None]
        few_alarms = np.exp(epsilons) * rates + deltas
        many_alarms = 1.0 - np.exp(-epsilons) * np.maximum(1.0 - deltas - rates, 0.0)
        least: np.ndarray = np.clip(np.minimum(few_alarms, many_alarms).min(axis=0), rates[0], 1.0)
        return least


def membership_sentence(trade_off: TradeOff | None) -> str:
    """Describe the bound at 1 % false alarms, rounded up; None means there is no guarantee."""
    if trade_off is None:
        return "No bound on membership attacks: the run is not private."
    false, true = trade_off.mark
    alarms, most = f"At {100 * false:g} % false alarms", ceil_text(100 * true, 2)
    if most == _NOTHING:
        return f"{alarms}, the bound on membership attacks says nothing: it is 100 %."
    return f"{alarms}, no attack detects a training record more than {most} % of the time."
