"""Hyperparameters of a sweep: what values one may take, how likely they are, and how Optuna is to draw them.

Every distribution that a W&B sweep file can name is here with the meaning that W&B's documentation gives it ("Sweep
configuration options", https://docs.wandb.ai/models/sweeps/sweep-config-keys). What Optuna has no distribution for
(normal, beta, given probabilities) is drawn as a share from 0 to 1 and taken through the quantile function, which is
exact; what is quantised is drawn as it was before and then rounded, as W&B does.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
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


_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,199}", re.ASCII)
_MOST: Final = 200
_MOST_VALUES: Final = 10_000
_LARGEST_WHOLE: Final = 2**53
"""Whole numbers beyond it are not told apart by the database."""
_LARGEST_EXPONENT: Final = 700.0
"""Of e; a larger power is no number."""
_RANGES: Final = (
    *("uniform", "int_uniform", "q_uniform", "log_uniform", "log_uniform_values", "q_log_uniform"),
    *("q_log_uniform_values", "inv_log_uniform", "inv_log_uniform_values"),
)
_NORMALS: Final = ("normal", "q_normal", "log_normal", "q_log_normal")
_BETAS: Final = ("beta", "q_beta")
_CHOICES: Final = ("categorical", "categorical_w_probabilities")
DISTRIBUTIONS: Final = ("constant", *_CHOICES, *_RANGES, *_NORMALS, *_BETAS)
_EXPONENTS: Final = ("log_uniform", "q_log_uniform", "inv_log_uniform")
"""Those whose min and max are logarithms."""


def parse_parameters(content: object) -> tuple[Parameter, ...]:
    """The parameters under the key `parameters`, in the file's order, nested ones with dots in their names.

    Raises:
        UsageError: something there is no parameter; the message begins with its key's path.
    """
    found = tuple(_parameters(content, "parameters", ""))
    if len(found) > _MOST:
        raise UsageError(f"parameters: there are {len(found)}, and at most {_MOST} can be searched")
    names = [parameter.name for parameter in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"parameters: two are called {name}")
    if all(parameter.is_constant for parameter in found):
        raise UsageError("parameters: all of them are constants, so there is nothing to search")
    return found


def _parameters(content: object, path: str, prefix: str) -> Iterator[Parameter]:
    if not isinstance(content, dict) or not content:
        raise UsageError(f"{path} must name parameters, each with its values, such as lr: {{min: 0.001, max: 0.1}}")
    for name, given in content.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(f"{path}: {name!r} is no name of a parameter: letters, digits and _ . - only")
        here, whole = f"{path}.{name}", f"{prefix}{name}"
        if isinstance(given, dict) and "parameters" in given:
            check_keys(given, ("parameters",), here)
            yield from _parameters(given["parameters"], f"{here}.parameters", f"{whole}.")
        else:
            yield _parameter(whole, given, here)


def _parameter(name: str, given: object, path: str) -> Parameter:
    if isinstance(given, list):
        return _choice(name, {"values": given}, path)
    if not isinstance(given, dict):
        return Parameter(name, "constant", values=(_plain(given, path),))
    distribution = given.get("distribution")
    if distribution is None:
        distribution = _meant(given, path)
    if distribution not in (*DISTRIBUTIONS, "range"):
        guess = difflib.get_close_matches(str(distribution), DISTRIBUTIONS, n=1)
        told = f"; did you mean {guess[0]}?" if guess else f"; there are {', '.join(DISTRIBUTIONS)}"
        raise UsageError(f"{path}.distribution: there is no {distribution!r}{told}")
    if distribution == "constant":
        check_keys(given, ("value", "distribution"), path)
        if "value" not in given:
            raise UsageError(f"{path}.value is missing")
        return Parameter(name, "constant", values=(_plain(given["value"], f"{path}.value"),))
    if distribution in _CHOICES:
        return _choice(name, given, path)
    if distribution == "range":
        return _own_range(name, given, path)
    if distribution in _RANGES:
        return _range(name, distribution, given, path)
    return _by_quantile(name, distribution, given, path)


def _meant(given: dict[Any, Any], path: str) -> str:
    """The distribution where none is named, as W&B has it: by the keys that are there and the type of the bounds."""
    if "value" in given:
        return "constant"
    if "values" in given:
        return "categorical"
    if "log" in given or "step" in given:
        return "range"
    if "min" in given and "max" in given:
        whole = all(type(given[key]) is int for key in ("min", "max"))
        return "q_uniform" if "q" in given else "int_uniform" if whole else "uniform"
    if "mu" in given or "sigma" in given:
        raise UsageError(f"{path}.distribution is missing: with mu and sigma it is normal, log_normal or q_normal")
    check_keys(given, ("value", "values", "min", "max", "distribution"), path)
    missing = "max" if "min" in given else "min" if "max" in given else None
    if missing:
        raise UsageError(f"{path}.{missing} is missing")
    raise UsageError(f"{path} must have values, a value, or min and max")


def _choice(name: str, given: dict[Any, Any], path: str) -> Parameter:
    check_keys(given, ("values", "probabilities", "distribution"), path)
    values = given.get("values")
    if not isinstance(values, list) or not values:
        raise UsageError(f"{path}.values must be a list with at least one value")
    if len(values) > _MOST_VALUES:
        raise UsageError(f"{path}.values has {len(values):,} values; at most {_MOST_VALUES:,} can be searched")
    kept = tuple(_plain(each, f"{path}.values") for each in values)
    texts = [json.dumps(each, sort_keys=True) for each in kept]
    for text in texts:
        if texts.count(text) > 1:
            raise UsageError(f"{path}.values has {text} twice")
    if given.get("probabilities") is None:
        if given.get("distribution") == "categorical_w_probabilities":
            raise UsageError(f"{path}.probabilities is missing")
        return Parameter(name, "categorical", values=kept)
    shares = given["probabilities"]
    if not isinstance(shares, list) or len(shares) != len(kept):
        raise UsageError(f"{path}.probabilities must be a list of {len(kept)} numbers, one for each value")
    numbers = [_number({"p": each}, "p", f"{path}.probabilities") for each in shares]
    if min(numbers) < 0 or not math.isclose(sum(numbers), 1, abs_tol=1e-6):
        raise UsageError(f"{path}.probabilities must be 0 or more and sum to 1, not to {sum(numbers):g}")
    total = sum(numbers)
    return Parameter(
        name, "categorical_w_probabilities", values=kept, probabilities=tuple(each / total for each in numbers)
    )


def _range(name: str, distribution: str, given: dict[Any, Any], path: str) -> Parameter:
    """One of W&B's distributions between two bounds."""
    quantised = distribution.startswith("q_")
    check_keys(given, ("min", "max", "distribution", *(["q"] if quantised else [])), path)
    low, high = _bounds(given, path)
    q = _positive(given, "q", path, 1) if quantised else None
    if distribution == "int_uniform":
        for key, value in (("min", low), ("max", high)):
            if not float(value).is_integer() or abs(value) > _LARGEST_WHOLE:
                raise UsageError(f"{path}.{key} must be a whole number for int_uniform, not {value!r}")
        return Parameter(name, distribution, int(low), int(high), whole=True)
    if distribution in _EXPONENTS:
        if max(abs(low), abs(high)) > _LARGEST_EXPONENT:
            raise UsageError(
                f"{path}: min and max of {distribution} are natural logarithms, and e to the power of {high:g} is too "
                "large; log_uniform_values takes the values themselves"
            )
        if distribution == "inv_log_uniform":
            low, high = -high, -low
        low, high = math.exp(low), math.exp(high)
    is_log = "log" in distribution
    if is_log and low <= 0:
        raise UsageError(f"{path}.min must be above 0 for {distribution}, not {low!r}")
    return Parameter(name, distribution, low, high, log=is_log, q=q)


def _own_range(name: str, given: dict[Any, Any], path: str) -> Parameter:
    """Stepscope's own form: min and max with log or step."""
    check_keys(given, ("min", "max", "log", "step", "distribution"), path)
    low, high = _bounds(given, path)
    log = given.get("log", False)
    if not isinstance(log, bool):
        raise UsageError(f"{path}.log must be true or false, not {log!r}")
    step = _positive(given, "step", path, None) if given.get("step") is not None else None
    if log and step is not None:
        raise UsageError(f"{path}: log and step do not go together")
    if log and low <= 0:
        raise UsageError(f"{path}.min must be above 0 where log is true, not {low!r}")
    whole = type(low) is int and type(high) is int and (step is None or type(step) is int)
    return Parameter(name, "range", low, high, whole=whole, log=log, step=step)


def _by_quantile(name: str, distribution: str, given: dict[Any, Any], path: str) -> Parameter:
    keys = ("a", "b") if distribution in _BETAS else ("mu", "sigma")
    quantised = distribution.startswith("q_")
    check_keys(given, (*keys, "distribution", *(["q"] if quantised else [])), path)
    q = _positive(given, "q", path, 1) if quantised else None
    if distribution in _BETAS:
        return Parameter(
            name,
            distribution,
            q=q,
            a=_positive(given, "a", path, 1.0),
            b=_positive(given, "b", path, 1.0),
        )
    mu = _number(given, "mu", path) if "mu" in given else 0.0
    sigma = _number(given, "sigma", path) if "sigma" in given else 1.0
    if sigma < 0:
        raise UsageError(f"{path}.sigma must not be below 0, and is {sigma:g}")
    if "log" in distribution and abs(mu) + 6 * sigma > _LARGEST_EXPONENT:
        raise UsageError(f"{path}: mu and sigma are of the natural logarithm, and e to the power of them is too large")
    return Parameter(name, distribution, q=q, mu=float(mu), sigma=float(sigma))


def _bounds(given: dict[Any, Any], path: str) -> tuple[float, float]:
    for key in ("min", "max"):
        if key not in given:
            raise UsageError(f"{path}.{key} is missing")
    low, high = _number(given, "min", path), _number(given, "max", path)
    if high <= low:
        raise UsageError(f"{path}.max must be above min: it is {high!r}, and min is {low!r}")
    return low, high


def _number(given: dict[Any, Any], key: str, path: str) -> float:
    value = given[key]
    where = path if path.endswith(".probabilities") else f"{path}.{key}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{where} must be a number, not {_shown(value)}")
    if not abs(value) <= 1e300:  # a comparison takes whole numbers of any length, and NaN is no less
        raise UsageError(f"{where} must be a finite number, not {_shown(value)}")
    return value


def _positive(given: dict[Any, Any], key: str, path: str, default: Any) -> Any:
    if given.get(key) is None:
        return default
    value = _number(given, key, path)
    if value <= 0:
        raise UsageError(f"{path}.{key} must be above 0, not {value!r}")
    return value


def _plain(value: object, path: str) -> Any:
    """The value, which must be one that JSON has."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: {_shown(value)} is no text, number, list or mapping") from error
    if isinstance(value, int) and abs(value) > _LARGEST_WHOLE:
        raise UsageError(f"{path}: {_shown(value)} is too large")
    return json.loads(text)


def check_keys(given: dict[Any, Any], known: Iterable[str], path: str) -> None:
    """Refuse a mapping with a key that is not known.

    Raises:
        UsageError: there is one; the message guesses what was meant.
    """
    names = tuple(known)
    for key in given:
        if key not in names:
            guess = difflib.get_close_matches(str(key), names, n=1)
            told = f"; did you mean {guess[0]}?" if guess else f" here; there are {', '.join(names)}"
            raise UsageError(f"{path}.{key} is not known{told}" if path else f"{key} is not known{told}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
