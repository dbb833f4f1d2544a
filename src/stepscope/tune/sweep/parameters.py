"""Hyperparameters of a sweep: their possible values, their probabilities, and how Optuna draws them.

Every distribution that a W&B sweep file can name is here with the meaning that W&B's documentation gives it ("Sweep
configuration options", https://docs.wandb.ai/models/sweeps/sweep-config-keys). Distributions that Optuna lacks
(normal, beta, given probabilities) are drawn as a share from 0 to 1 and mapped through the quantile function, which is
exact; quantised ones are drawn unquantised and then rounded, as W&B does.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from stepscope.errors import UsageError

if TYPE_CHECKING:
    import optuna


_SHARES: Final = (1e-9, 1 - 1e-9)
"""Limits of the shares for quantiles: at 0 and 1 a normal distribution's are infinite."""
_MOST_ON_A_GRID: Final = 10_000
BY_SHARE: Final = ("categorical_w_probabilities", "normal", "q_normal", "log_normal", "q_log_normal", "beta", "q_beta")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One hyperparameter.

    Attributes:
        name: as passed to the program; for a nested one the names from outside in, joined by dots.
        distribution: W&B's name for it; "range" for stepscope's own form, with `log` and `step`.
        low, high: bounds of the values; for W&B's log_uniform and inv_log_uniform the values, not their logarithms.
        whole: whether only whole numbers are drawn.
        log: whether the logarithm is uniform.
        step: distance between neighbouring values of a range; None for continuous values (or whole numbers 1 apart).
        q: values are rounded to multiples of it; None without rounding.
        values: a choice's values; a constant's only one.
        probabilities: the values' probabilities, which sum to 1; empty if all are equal.
        mu, sigma: parameters of a normal distribution, or of the logarithm's.
        a, b: parameters of a beta distribution.
    """

    name: str
    distribution: str
    low: int | float | None = None
    high: int | float | None = None
    whole: bool = False
    log: bool = False
    step: int | float | None = None
    q: int | float | None = None
    values: tuple[Any, ...] = ()
    probabilities: tuple[float, ...] = ()
    mu: float = 0.0
    sigma: float = 1.0
    a: int | float = 1.0
    b: int | float = 1.0

    @property
    def is_constant(self) -> bool:
        return self.distribution == "constant"

    @property
    def is_choice(self) -> bool:
        return self.distribution in ("categorical", "categorical_w_probabilities")

    @property
    def is_logarithmic(self) -> bool:
        """Whether its values are best plotted on a logarithmic scale."""
        return self.log or "log" in self.distribution

    def optuna_distribution(self) -> optuna.distributions.BaseDistribution:
        """The distribution that Optuna draws from; `value_of` converts the draw into the value."""
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
        """Convert Optuna's draw into the program's value."""
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
        """All possible values, each once, in order.

        Raises UsageError if its values cannot be enumerated, or are too many.
        """
        if self.distribution == "categorical_w_probabilities":
            raise UsageError(f"{self.path}.probabilities: a grid tries all values; leave the probabilities out")
        if self.is_choice:
            return self.labels()
        if self.distribution in BY_SHARE or (self.log and not (self.whole or self.q)):
            raise UsageError(f"{self.path}: a grid needs values that can be enumerated: give values: [...]")
        step = self.step if self.step is not None else self.q if self.q is not None else 1 if self.whole else None
        if step is None:
            raise UsageError(f"{self.path}: a grid needs values that can be enumerated: give values: [...] or a step")
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
        return "parameters." + self.name.replace(".", ".parameters.")

    def labels(self) -> list[Any]:
        """The values of a choice as Optuna stores them: themselves if it can distinguish them, else as JSON."""
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
        """Index of the last value with a probability above 0: rounding must not select a later one."""
        return max(number for number, each in enumerate(self.probabilities) if each > 0)


def quantised(value: float, q: float) -> float:
    """Round the value to a multiple of `q`; a whole number if `q` is one."""
    multiple = round(value / q)
    if float(q).is_integer():
        return int(multiple * q)
    return float(multiple * Decimal(str(q)))


_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,199}", re.ASCII)
_MOST: Final = 200
_MOST_VALUES: Final = 10_000
_LARGEST_WHOLE: Final = 2**53
"""The database cannot distinguish larger whole numbers."""
_LARGEST_EXPONENT: Final = 700.0
"""Exponent of e; a larger power is not finite."""
_EXPONENTS: Final = ("log_uniform", "q_log_uniform", "inv_log_uniform")
"""Distributions whose min and max are logarithms."""
_KEYS: Final = {
    "constant": ("value",),
    "categorical": ("values", "probabilities"),
    "categorical_w_probabilities": ("values", "probabilities"),
    "range": ("min", "max", "log", "step"),
    **dict.fromkeys(("uniform", "int_uniform", "log_uniform", "log_uniform_values"), ("min", "max")),
    **dict.fromkeys(("inv_log_uniform", "inv_log_uniform_values"), ("min", "max")),
    **dict.fromkeys(("q_uniform", "q_log_uniform", "q_log_uniform_values"), ("min", "max", "q")),
    **dict.fromkeys(("normal", "log_normal"), ("mu", "sigma")),
    **dict.fromkeys(("q_normal", "q_log_normal"), ("mu", "sigma", "q")),
    "beta": ("a", "b"),
    "q_beta": ("a", "b", "q"),
}
"""Distribution -> its permitted keys in a file."""
_NEEDED: Final = ("value", "min", "max")
DISTRIBUTIONS: Final = tuple(name for name in _KEYS if name != "range")

Positive: TypeAlias = Annotated[int, Meta(gt=0)] | Annotated[float, Meta(gt=0)]


@dataclass(frozen=True, slots=True)
class _Given:
    """The keys that a file may have for a parameter, of any distribution."""

    distribution: str | None = None
    value: Any = None
    values: Annotated[list[Any], Meta(min_length=1, max_length=_MOST_VALUES)] | None = None
    probabilities: list[int | float] | None = None
    min: int | float = 0
    max: int | float = 0
    log: bool = False
    step: Positive | None = None
    q: Positive | None = None
    mu: int | float = 0.0
    sigma: Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0)] = 1.0
    a: Positive | None = None
    b: Positive | None = None


def parse_parameters(content: object) -> tuple[Parameter, ...]:
    """Parse the parameters under the key `parameters`, in the file's order, nested ones with dots in their names.

    Raises UsageError for an invalid parameter; the message begins with its key's path.
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
            raise UsageError(f"{path}: {name!r} cannot name a parameter: use letters, digits and _ . - only")
        here, whole = f"{path}.{name}", f"{prefix}{name}"
        if isinstance(given, dict) and "parameters" in given:
            check_keys(given, ("parameters",), here)
            yield from _parameters(given["parameters"], f"{here}.parameters", f"{whole}.")
        else:
            yield _parameter(whole, given, here)


def _parameter(name: str, content: object, path: str) -> Parameter:
    if isinstance(content, list):
        content = {"values": content}
    elif not isinstance(content, dict):
        content = {"value": content}
    distribution = content.get("distribution")
    if distribution is None:
        distribution = _meant(content, path)
    if not isinstance(distribution, str) or distribution not in _KEYS:
        guess = difflib.get_close_matches(str(distribution), DISTRIBUTIONS, n=1)
        hint = f"; did you mean {guess[0]}?" if guess else f"; there are {', '.join(DISTRIBUTIONS)}"
        raise UsageError(f"{path}.distribution: there is no {distribution!r}{hint}")
    check_keys(content, (*_KEYS[distribution], "distribution"), path)
    for key in _NEEDED:
        if key in _KEYS[distribution] and key not in content:
            raise UsageError(f"{path}.{key} is missing")
    given = checked(content, _Given, path)
    if distribution == "constant":
        return Parameter(name, distribution, values=(_plain(given.value, f"{path}.value"),))
    if "values" in _KEYS[distribution]:
        return _choice(name, distribution, given, path)
    if "min" in _KEYS[distribution]:
        return _range(name, distribution, given, path)
    return _by_quantile(name, distribution, given, path)


def _meant(given: dict[Any, Any], path: str) -> str:
    """The default distribution as W&B chooses it: by the keys that are present and the type of the bounds."""
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
    for key, other in (("max", "min"), ("min", "max")):
        if other in given:
            raise UsageError(f"{path}.{key} is missing")
    raise UsageError(f"{path} must have values, a value, or min and max")


def _choice(name: str, distribution: str, given: _Given, path: str) -> Parameter:
    if given.values is None:
        raise UsageError(f"{path}.values must be a list with at least one value")
    kept = tuple(_plain(each, f"{path}.values") for each in given.values)
    texts = [json.dumps(each, sort_keys=True) for each in kept]
    for text, count in Counter(texts).items():
        if count > 1:
            raise UsageError(f"{path}.values has {text} twice")
    shares = given.probabilities
    if shares is None:
        if distribution == "categorical_w_probabilities":
            raise UsageError(f"{path}.probabilities is missing")
        return Parameter(name, "categorical", values=kept)
    if len(shares) != len(kept):
        raise UsageError(f"{path}.probabilities must be a list of {len(kept)} numbers, one for each value")
    total = sum(shares)
    if min(shares) < 0 or not math.isclose(total, 1, abs_tol=1e-6):
        raise UsageError(f"{path}.probabilities must be 0 or more and sum to 1, not to {total:g}")
    probabilities = tuple(each / total for each in shares)
    return Parameter(name, "categorical_w_probabilities", values=kept, probabilities=probabilities)


def _range(name: str, distribution: str, given: _Given, path: str) -> Parameter:
    """A distribution between two bounds: stepscope's own "range", and W&B's."""
    low, high = given.min, given.max
    if high <= low:
        raise UsageError(f"{path}.max must be above min: it is {high!r}, and min is {low!r}")
    if distribution == "int_uniform":
        for key, value in (("min", low), ("max", high)):
            if not float(value).is_integer() or abs(value) > _LARGEST_WHOLE:
                raise UsageError(f"{path}.{key} must be a whole number for int_uniform, not {value!r}")
        return Parameter(name, distribution, int(low), int(high), whole=True)
    if distribution in _EXPONENTS:
        low, high = _values_of_exponents(distribution, low, high, path)
    is_log = given.log if distribution == "range" else "log" in distribution
    if given.log and given.step is not None:
        raise UsageError(f"{path}: log and step do not go together")
    if is_log and low <= 0:
        kind = "where log is true" if distribution == "range" else f"for {distribution}"
        raise UsageError(f"{path}.min must be above 0 {kind}, not {low!r}")
    if distribution == "range":
        whole = all(type(each) is int for each in (low, high, given.step) if each is not None)
        return Parameter(name, distribution, low, high, whole=whole, log=is_log, step=given.step)
    return Parameter(name, distribution, low, high, log=is_log, q=_rounded_to(distribution, given))


def _values_of_exponents(distribution: str, low: float, high: float, path: str) -> tuple[float, float]:
    if max(abs(low), abs(high)) > _LARGEST_EXPONENT:
        raise UsageError(
            f"{path}: min and max of {distribution} are natural logarithms, and e to the power of {high:g} is too "
            "large; log_uniform_values takes the values themselves"
        )
    if distribution == "inv_log_uniform":
        low, high = -high, -low
    return math.exp(low), math.exp(high)


def _rounded_to(distribution: str, given: _Given) -> int | float | None:
    """The rounding of W&B's quantised distributions; 1 if the file does not say."""
    return (given.q or 1) if distribution.startswith("q_") else None


def _by_quantile(name: str, distribution: str, given: _Given, path: str) -> Parameter:
    q = _rounded_to(distribution, given)
    if "beta" in distribution:
        return Parameter(name, distribution, q=q, a=given.a or 1.0, b=given.b or 1.0)
    if "log" in distribution and abs(given.mu) + 6 * given.sigma > _LARGEST_EXPONENT:
        raise UsageError(f"{path}: mu and sigma describe the natural logarithm, and e to their power is too large")
    return Parameter(name, distribution, q=q, mu=float(given.mu), sigma=float(given.sigma))


def _plain(value: object, path: str) -> Any:
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: {_shown(value)} is not text, a number, a list or a mapping") from error
    if isinstance(value, int) and abs(value) > _LARGEST_WHOLE:
        raise UsageError(f"{path}: {_shown(value)} is too large")
    return json.loads(text)


def check_keys(given: dict[Any, Any], known: Iterable[str], path: str) -> None:
    """Refuse a mapping with an unknown key.

    Raises UsageError that suggests the key that was probably meant.
    """
    names = tuple(known)
    for key in given:
        if key not in names:
            guess = difflib.get_close_matches(str(key), names, n=1)
            hint = f"; did you mean {guess[0]}?" if guess else f" here; there are {', '.join(names)}"
            raise UsageError(f"{path}.{key} is unknown{hint}" if path else f"{key} is not known{hint}")


_Record = TypeVar("_Record")
_IN_WORDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
}


def checked(content: dict[Any, Any], kind: type[_Record], path: str = "", **named: str) -> _Record:
    """Convert the content of a mapping into a record; a key without a value counts as left out.

    Args:
        named: field name -> the key in the file, if they differ.

    Raises:
        UsageError: a value is of another type or out of range; the message begins with the key's path.
    """
    fields = {key: field for field, key in named.items()}
    given = {fields.get(key, key): value for key, value in content.items() if value is not None}
    for key, value in given.items():
        if isinstance(value, (int, float)) and not abs(value) <= 1e300:  # false for NaN, and exact for integers
            raise UsageError(f"{_joined(path, key)} must be a finite number, not {_shown(value)}")
    try:
        return msgspec.convert(given, kind)
    except UnicodeEncodeError as error:  # half of a surrogate pair, which YAML and JSON may spell out
        raise UsageError(f"{path or 'the file'} holds text that is not Unicode: {_shown(error.object)}") from None
    except msgspec.ValidationError as error:
        expected, _, place = str(error).partition(" - at `$")
        key = place.strip(".`")
        value, where = given.get(key.partition("[")[0]), _joined(path, named.get(key, key))
        if expected.startswith("Invalid enum value"):
            choices = get_args(get_type_hints(kind)[key])
            raise UsageError(f"{where}: there is no {value!r}; there are {', '.join(choices)}") from None
        words = re.sub(r"^Expected | \| null|int \| (?=float)|, got.*", "", expected)
        words = re.sub(r"`(\w+)`", lambda match: _IN_WORDS.get(match[1], match[1]), words)
        raise UsageError(f"{where} must be {words}, not {_shown(value)}") from None


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
