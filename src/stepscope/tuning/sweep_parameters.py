"""Hyperparameters of a sweep: what values one may take, how likely they are, and how Optuna is to draw them.

Every distribution that a W&B sweep file can name is here with the meaning that W&B's documentation gives it ("Sweep
configuration options", https://docs.wandb.ai/models/sweeps/sweep-config-keys). What Optuna has no distribution for
(normal, beta, given probabilities) is drawn as a share from 0 to 1 and taken through the quantile function, which is
exact; what is quantised is drawn as it was before and then rounded, as W&B does.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from dataclasses import asdict, dataclass
from decimal import Decimal
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from stepscope.errors import UsageError

if TYPE_CHECKING:
    import optuna

_SHARES: Final = (1e-9, 1 - 1e-9)
"""Shares that quantiles are taken of: those of 0 and 1 are infinite for a normal distribution."""
_MOST_ON_A_GRID: Final = 10_000
BY_SHARE: Final = ("categorical_w_probabilities", "normal", "q_normal", "log_normal", "q_log_normal", "beta", "q_beta")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One hyperparameter.

    Attributes:
        name: as the program is given it; of a nested one the names from outside in, joined by dots.
        distribution: W&B's name of it; "range" for one of stepscope's own form, with `log` and `step`.
        low, high: the least and the largest value; of the log_uniform and inv_log_uniform of W&B, the values, not
            their logarithms.
        whole: whether only whole numbers are drawn.
        log: whether the logarithm is uniform.
        step: between neighbouring values of a range; None where they lie densely (or, of whole numbers, at 1).
        q: what values are rounded to multiples of; None where they are not.
        values: of a choice; of a constant its only one.
        probabilities: of the values, which sum to 1; empty where all are alike.
        mu, sigma: of a normal distribution, or of the logarithm.
        a, b: of a beta distribution.
    """

    name: str
    distribution: str
    low: float | None = None
    high: float | None = None
    whole: bool = False
    log: bool = False
    step: float | None = None
    q: float | None = None
    values: tuple[Any, ...] = ()
    probabilities: tuple[float, ...] = ()
    mu: float = 0.0
    sigma: float = 1.0
    a: float = 1.0
    b: float = 1.0

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Parameter:
        """The reverse of `to_json`."""
        lists = {name: tuple(content[name]) for name in ("values", "probabilities")}
        return cls(**{**content, **lists})

    @property
    def is_constant(self) -> bool:
        """Whether there is nothing to search."""
        return self.distribution == "constant"

    @property
    def is_choice(self) -> bool:
        """Whether it takes one of given values."""
        return self.distribution in ("categorical", "categorical_w_probabilities")

    @property
    def is_logarithmic(self) -> bool:
        """Whether its values are best looked at by their logarithms."""
        return self.log or "log" in self.distribution

    def optuna_distribution(self) -> optuna.distributions.BaseDistribution:
        """What Optuna draws for it; `value_of` makes the value of that."""
        import optuna

        if self.distribution in BY_SHARE:
            return optuna.distributions.FloatDistribution(*_SHARES)
        if self.is_choice:
            return optuna.distributions.CategoricalDistribution(self.labels())
        assert self.low is not None
        assert self.high is not None
        if self.whole:
            step = 1 if self.step is None else int(self.step)
            return optuna.distributions.IntDistribution(int(self.low), int(self.high), log=self.log, step=step)
        return optuna.distributions.FloatDistribution(
            float(self.low), float(self.high), log=self.log, step=None if self.step is None else float(self.step)
        )

    def value_of(self, drawn: Any) -> Any:
        """The value that the program is given for what Optuna drew."""
        if self.distribution == "categorical_w_probabilities":
            bounds = list(accumulate(self.probabilities))
            return self.values[min(bisect_right(bounds, drawn), self._last_likely())]
        if self.is_choice:
            return self.values[self.labels().index(drawn)]
        if self.distribution in BY_SHARE:
            drawn = self._quantile(drawn)
        if self.q is not None:
            return quantised(drawn, self.q)
        return drawn

    def grid(self) -> list[Any]:
        """What can be drawn, all of it, with each value once; in order.

        Raises:
            UsageError: its values cannot be counted up, or are too many.
        """
        if self.distribution == "categorical_w_probabilities":
            raise UsageError(f"{self.path}.probabilities: a grid tries all values; leave the probabilities out")
        if self.is_choice:
            return self.labels()
        if self.distribution in BY_SHARE or (self.log and not (self.whole or self.q)):
            raise UsageError(f"{self.path}: a grid needs values that can be counted up: give values: [...]")
        step = self.step if self.step is not None else self.q if self.q is not None else 1 if self.whole else None
        if step is None:
            raise UsageError(f"{self.path}: a grid needs values that can be counted up: give values: [...] or a step")
        assert self.low is not None
        assert self.high is not None
        if (self.high - self.low) / step > _MOST_ON_A_GRID:
            raise UsageError(f"{self.path} has more than {_MOST_ON_A_GRID:,} values, too many for a grid")
        if self.q is not None:
            first, last = round(self.low / self.q), round(self.high / self.q)
            return [min(max(number * self.q, self.low), self.high) for number in range(first, last + 1)]
        if self.whole:
            return list(range(int(self.low), int(self.high) + 1, int(step)))
        count = math.floor((self.high - self.low) / step + 1e-9)
        return [float(Decimal(str(self.low)) + number * Decimal(str(step))) for number in range(count + 1)]

    @property
    def path(self) -> str:
        """Where it stands in the file."""
        return "parameters." + self.name.replace(".", ".parameters.")

    def labels(self) -> list[Any]:
        """The values of a choice as Optuna keeps them: themselves where it can tell them apart, else as JSON."""
        plain = all(each is None or isinstance(each, (str, int, float, bool)) for each in self.values)
        if plain and all(self.values.count(each) == 1 for each in self.values):
            return list(self.values)
        return [json.dumps(each, sort_keys=True) for each in self.values]

    def _quantile(self, share: float) -> float:
        if "beta" in self.distribution:
            from scipy.stats import beta

            return float(beta.ppf(share, self.a, self.b))
        from statistics import NormalDist

        drawn = NormalDist(self.mu, self.sigma).inv_cdf(share) if self.sigma else self.mu
        return math.exp(drawn) if "log" in self.distribution else drawn

    def _last_likely(self) -> int:
        """The last value that is drawn at all: rounding must not let another one in."""
        return max(number for number, each in enumerate(self.probabilities) if each > 0)


def quantised(value: float, q: float) -> float:
    """The value rounded to a multiple of `q`; a whole number where `q` is one."""
    multiple = round(value / q)
    if float(q).is_integer():
        return int(multiple * q)
    return float(multiple * Decimal(str(q)))
