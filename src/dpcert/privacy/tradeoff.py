"""What epsilon means: how often the best possible membership attack can detect one record.

An attacker sees the released weights and everything else, all other training records and all public settings included, and
decides whether one given record was used. False-positive rate: how often it says yes although the record was not used.
True-positive rate: how often it says yes when it was.

Guarantee: if training is (epsilon, delta(epsilon))-private for adding and for removing a record, no attack of any kind has

    TPR <= e^epsilon FPR + delta(epsilon)    and    1 - FPR <= e^epsilon (1 - TPR) + delta(epsilon)

for any epsilon >= 0 (Wasserman and Zhou 2010; Kairouz et al. 2015). The curve is the smallest of all these bounds. They also
hold for an attack whose alarm is that the record is missing.
Assumes: one record. Someone with several records is protected less.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .._validate import finite_in
from ..rounding import ceil_text

FALSE_ALARMS = 0.01  # where the sentence looks
_NOTHING = "100.00"


@dataclass(frozen=True, eq=False)
class TradeOff:
    """An upper bound on the true-positive rate of every membership attack, by false-positive rate.

    `deltas` belong to `epsilons`, as `accounting.privacy_profile` gives them.
    """

    epsilons: np.ndarray
    deltas: np.ndarray

    @property
    def mark(self) -> tuple[float, float]:
        """The false-positive rate of the sentence, and the bound there."""
        return FALSE_ALARMS, self.true_positive_rate(FALSE_ALARMS)

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """The most that any attack detects at this false-positive rate."""
        finite_in("false_positive_rate", false_positive_rate, 0.0, 1.0)
        return float(self.true_positive_rates([false_positive_rate])[0])

    def true_positive_rates(self, false_positive_rates: Sequence[float] | np.ndarray) -> np.ndarray:
        """`true_positive_rate` for each of many rates."""
        rates = np.asarray(false_positive_rates, dtype=np.float64)[None, :]
        epsilons, deltas = self.epsilons[:, None], self.deltas[:, None]
        few_alarms = np.exp(epsilons) * rates + deltas
        many_alarms = 1.0 - np.exp(-epsilons) * np.maximum(1.0 - deltas - rates, 0.0)
        least: np.ndarray = np.clip(np.minimum(few_alarms, many_alarms).min(axis=0), rates[0], 1.0)
        return least


def membership_sentence(trade_off: TradeOff | None) -> str:
    """The bound at 1 % false alarms in words, rounded up; None means that nothing is promised."""
    if trade_off is None:
        return "No bound on membership attacks: the run is not private."
    false, true = trade_off.mark
    alarms, most = f"At {100 * false:g} % false alarms", ceil_text(100 * true, 2)
    if most == _NOTHING:
        return f"{alarms}, the bound on membership attacks says nothing: it is 100 %."
    return f"{alarms}, no attack detects a training record more than {most} % of the time."
