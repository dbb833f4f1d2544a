"""Named functions that do what a chain of element-wise operators spells out."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

from stepscope.analysis.chains import Chain
from stepscope.diagnosis.finding import Remedy


@dataclass(frozen=True, slots=True)
class FusedFunction:
    """One function that a framework has.

    Attributes:
        name: as it is written in a program.
        what: for a title.
        text, code: the remedy.
    """

    name: str
    what: str
    text: str
    code: str

    @property
    def remedy(self) -> Remedy:
        return Remedy(self.text, self.code)


def _function(name: str, code: str) -> FusedFunction:
    return FusedFunction(name, f"{name}()", f"Call {name}(), which does all of it in one kernel.", code)


_GELU_TANH: Final = _function("F.gelu", 'y = torch.nn.functional.gelu(x, approximate="tanh")')
_GELU: Final = _function("F.gelu", "y = torch.nn.functional.gelu(x)")
_SILU: Final = _function("F.silu", "y = torch.nn.functional.silu(x)      # instead of x * torch.sigmoid(x)")
_LAYER_NORM: Final = _function(
    "F.layer_norm", "y = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)   # or nn.LayerNorm"
)
_BATCH_NORM: Final = _function(
    "F.batch_norm", "self.norm = torch.nn.BatchNorm1d(features)   # or BatchNorm2d for images"
)
_RMS_NORM: Final = _function(
    "F.rms_norm", "y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)   # or nn.RMSNorm"
)
_RMS_NORM_COMPILED: Final = FusedFunction(
    "torch.compile",
    "one compiled function",
    "Compile the function that holds the normalisation; F.rms_norm() is not fused on a CPU.",
    "@torch.compile                # F.rms_norm() runs the same operators on a CPU\ndef rms_norm(x, weight): ...",
)
_SOFTMAX: Final = _function("torch.softmax", "y = torch.softmax(x, dim=-1)")
_LOG_SOFTMAX: Final = _function(
    "F.log_softmax", "y = torch.nn.functional.log_softmax(x, dim=-1)   # with nll_loss: cross_entropy(x, target)"
)
_DROPOUT: Final = _function("F.dropout", "y = torch.nn.functional.dropout(x, p, training=self.training)")
_OPTIMIZER: Final = FusedFunction(
    "torch.optim",
    "an optimizer with fused=True",
    "Let an optimizer of torch.optim update all parameters in one fused call.",
    "optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)\noptimizer.step()",
)


def fused_function(chain: Chain, *, on_device: bool) -> FusedFunction | None:
    """The function that does what this chain does, None where none is known.

    Args:
        on_device: whether a device runs it; some functions are fused only there.
    """
    names = set(chain.names)
    if _updates_parameters(chain):
        return _OPTIMIZER
    if "softmax" in names and "log" in names:
        return _LOG_SOFTMAX
    if "exp" in names and "sum" in names and "div" in names:
        return _LOG_SOFTMAX if "log" in names else _SOFTMAX
    if "logsumexp" in names and "sub" in names:
        return _LOG_SOFTMAX
    if names & {"rand_like", "bernoulli"} and names & {"mul", "div"}:
        return _DROPOUT
    normalisation = _normalisation(chain)
    if normalisation is _RMS_NORM and not on_device:
        return _RMS_NORM_COMPILED
    return normalisation or _activation(chain)


def _updates_parameters(chain: Chain) -> bool:
    """A square root of a running average, and parameters that are overwritten with a quotient: Adam."""
    changed = {name for name, in_place in zip(chain.names, chain.in_place, strict=True) if in_place}
    return "sqrt" in chain.names and bool(changed & {"addcdiv", "sub", "add"}) and bool(changed & {"mul", "lerp"})


def _normalisation(chain: Chain) -> FusedFunction | None:
    names = set(chain.names)
    root = names & {"sqrt", "rsqrt", "std", "pow"} and names & {"div", "mul", "rsqrt"}
    averages = names & {"mean", "var", "var_mean"}
    if not root or not averages or not names & {"sqrt", "rsqrt", "std"}:
        return None
    if "sub" not in names:
        return _RMS_NORM if "mean" in names and names & {"pow", "square", "mul"} else None
    return _LAYER_NORM if _over_last_dimension(chain) else _BATCH_NORM


def _over_last_dimension(chain: Chain) -> bool:
    """Whether the averages that are subtracted are over the last dimension: one number for each row."""
    for name, moved in zip(chain.names, chain.traffic, strict=True):
        if name == "sub" and len(moved.inputs) > 1:
            small = min(moved.inputs, key=prod)
            return bool(small[-1] == 1)
    return True


def _activation(chain: Chain) -> FusedFunction | None:
    names = chain.names
    if "erf" in names and names.count("mul") + names.count("div") >= 2:
        return _GELU
    if "tanh" in names and names.count("mul") >= 3 and "add" in names:
        return _GELU_TANH
    after = names[names.index("sigmoid") + 1 :] if "sigmoid" in names else ()
    return _SILU if after and after[0] == "mul" else None
