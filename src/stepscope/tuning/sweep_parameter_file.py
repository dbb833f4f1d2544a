"""The parameters of a sweep file, W&B's and the short form, read into `Parameter`s; mistakes are named by their key."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from stepscope.errors import UsageError
from stepscope.tuning.sweep_parameters import Parameter

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
