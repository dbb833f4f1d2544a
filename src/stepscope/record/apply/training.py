"""Remedies for training: losses over many classes, scalars read only to be logged, gradients and optimizer steps.

A statement such as `history.append(loss.item())` or `running += loss.item()` gets a number that is copied to the host
asynchronously. The call of `.item()` is patched, since a loop that is already running cannot be given new code.
Gradients are cleared, clipped and reduced in faster ways.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from stepscope import guard
from stepscope.record.apply.code_swaps import source_of
from stepscope.record.apply.flags import Flag, Value
from stepscope.record.apply.patching import Applying, in_a_line, is_users_file, made_here, users_place
from stepscope.record.lines import compiling
from stepscope.remedies.rewrites.context import SourceText, is_pure

if TYPE_CHECKING:
    from stepscope.remedies import DeferredNumber

LOSS_FLAGS: Final = (
    Flag(
        "chunked-loss",
        "computes cross entropy over many classes in blocks of positions, without a second tensor of all scores",
        "no cross entropy over 2,000 classes or more was computed",
        "Only scores of shape (positions, classes) with class numbers as targets, and not inside a compiled model. The "
        "scores still take a tensor, which `stepscope.remedies.chunked_cross_entropy` can save.",
    ),
)
_FEWEST_CLASSES: Final = 2000
"""Threshold of the rule large-logits."""
_FEWEST_SCORES: Final = 2**18
"""Fewer fit in one block on a CPU, and gain nothing."""


def install_losses(applying: Applying, chosen: Mapping[str, str]) -> None:
    import torch

    from stepscope.remedies import chunked_cross_entropy

    is_compiling = compiling()

    def loss(
        original: Any,
        input: Any,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: Any = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        def as_it_was() -> Any:
            return original(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)

        if is_compiling() or not _is_large(input, target) or not (size_average is reduce is None):
            return as_it_was()
        place = users_place() or "an unknown place"
        try:
            found = chunked_cross_entropy(
                input,
                target,
                weight=weight,
                ignore_index=ignore_index,
                reduction=reduction,
                label_smoothing=label_smoothing,
                keep_logits=True,
            )
        except (TypeError, ValueError, RuntimeError) as error:
            applying.could_not("chunked-loss", f"the loss at {place}: {in_a_line(error)}")
            return as_it_was()
        applying.did("chunked-loss", f"the loss over {input.shape[1]:,} classes at {place} is computed in blocks")
        return found

    applying.wrap(torch.nn.functional, "cross_entropy", loss)


def _is_large(scores: Any, target: Any) -> bool:
    return bool(
        scores.dim() == 2
        and scores.shape[1] >= _FEWEST_CLASSES
        and scores.numel() >= _FEWEST_SCORES
        and not target.is_floating_point()
    )


_DEFERRED: Final = "deferred-logging"
LOGGING_FLAGS: Final = (
    Flag(
        _DEFERRED,
        "reads the device's numbers that are appended to a list or added up only when they are used, not in every step",
        "no line appended a number that was read from a device to a list, or added it up",
        "Numbers that are printed or logged at once still wait. On a CPU there is nothing to wait for. The numbers "
        "behave like floats, but have another type, which only code that checks types notices.",
    ),
)
_MOST_UNREAD: Final = 256
"""Maximum pending numbers in pinned memory; beyond it, the oldest is waited for."""


def install_logging(applying: Applying, chosen: Mapping[str, str]) -> None:
    """Watch which lines read a tensor as a number."""
    import torch

    logged = _LoggedNumbers(applying)

    def item(original: Any, self: torch.Tensor) -> Any:
        frame = sys._getframe(2)  # outside the guard
        code = frame.f_code
        verdict = logged.verdicts.get((id(code), frame.f_lineno))
        if verdict is None:
            with applying.guarded(_DEFERRED):
                verdict = logged.judge(code, frame.f_lineno)
        return logged.number(self, verdict) if verdict and type(self) in logged.types else original(self)

    applying.wrap(torch.Tensor, "item", item)


class _LoggedNumbers:
    """Which source lines only store the numbers that they read, and the numbers still pending.

    Attributes:
        verdicts: maps (id of a code object, line) to the line's name, "" if it does more with the number.
        types: types of the tensors whose numbers can be deferred.
    """

    def __init__(self, applying: Applying) -> None:
        import torch

        self._applying = applying
        self._original = torch.Tensor.item
        self._compiling = getattr(torch.compiler, "is_compiling", lambda: False)
        self._held: list[Any] = []
        self._unread: deque[DeferredNumber] = deque()
        self._has_started = False
        self.verdicts: dict[tuple[int, int], str] = {}
        self.types = (torch.Tensor, torch.nn.Parameter)

    def judge(self, code: Any, line: int) -> str:
        verdict = ""
        if is_users_file(code.co_filename):
            text = kept_in(code.co_filename).get(line)
            verdict = f"{text} at {os.path.basename(code.co_filename)}:{line}" if text else ""
        self._held.append(code)  # keep it alive, so that its id stays unique
        self.verdicts[id(code), line] = verdict
        return verdict

    def number(self, tensor: Any, where: str) -> Any:
        if self._compiling() or not tensor.is_floating_point() or tensor.numel() != 1:
            return self._original(tensor)
        if tensor.device.type == "cpu":
            why = "the number is on the CPU, where reading it waits for nothing"
            self._applying.could_not(_DEFERRED, f"{where}: {why}")
            return self._original(tensor)
        from stepscope.remedies import DeferredNumber

        number = DeferredNumber(tensor)
        self._applying.did(_DEFERRED, f"{where} no longer waits for the device")
        if not self._has_started:
            self._has_started = True
            _let_others_read(self._applying)
        self._unread.append(number)
        while self._unread and (len(self._unread) > _MOST_UNREAD or self._unread[0].is_there):
            _ = self._unread.popleft().value
        return number


@lru_cache(maxsize=256)
def kept_in(file: str) -> Mapping[int, str]:
    """Map each line that only stores the number it reads to its statement, shortened."""
    text = source_of(file)
    if text is None:
        return {}
    try:
        source = SourceText(text)
    except ValueError:
        return {}
    found = {}
    for place in source.places():
        statement = place.statement
        value = _kept(statement)
        if value is not None and _only_reads(value):
            words = " ".join(source.of(statement).split())
            for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
                found[line] = words if len(words) <= 60 else f"{words[:57]}..."
    return found


def _kept(statement: ast.stmt) -> ast.expr | None:
    """Return the value that a statement appends to a list or adds to a number."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
        return statement.value
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "append":
        return call.args[0] if len(call.args) == 1 and not call.keywords else None
    return None


def _only_reads(value: ast.expr) -> bool:
    """Whether an expression is a tensor's .item(), or sums and products of it with operands that are not calls."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add | ast.Sub | ast.Mult):
        sides = (value.left, value.right)
        return any(_only_reads(side) for side in sides) and all(_only_reads(side) or is_pure(side) for side in sides)
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr == "item"
        and not value.args
        and not value.keywords
    )


def _let_others_read(applying: Applying) -> None:
    """Make JSON and torch, which check the type of a number, accept deferred numbers."""
    import torch

    from stepscope.remedies import DeferredNumber

    def default(original: Any, encoder: Any, value: Any) -> Any:
        return value.value if isinstance(value, DeferredNumber) else original(encoder, value)

    def made(original: Any, data: Any, *positional: Any, **named: Any) -> Any:
        if isinstance(data, list | tuple) and any(isinstance(each, DeferredNumber) for each in data):
            data = [each.value if isinstance(each, DeferredNumber) else each for each in data]
        elif isinstance(data, DeferredNumber):
            data = data.value
        return original(data, *positional, **named)

    applying.wrap(json.JSONEncoder, "default", default)
    applying.wrap(torch, "tensor", made)
    applying.wrap(torch, "as_tensor", made)


OPTIMIZER_FLAGS: Final = (
    Flag(
        "fuse-optimizer",
        "lets each optimizer update all parameters in one or a few kernels",
        "no optimizer stepped",
        "Optimizers that torch can fuse: Adam, AdamW, SGD and others. The update is the same up to rounding.",
    ),
    Flag(
        "clip-in-one-pass",
        "has clip_grad_norm_ measure and scale all gradients in one pass, without waiting for the device",
        "torch.nn.utils.clip_grad_norm_ was not called",
        "Not if the program asks for error_if_nonfinite, or if gradients are distributed tensors.",
    ),
    Flag(
        "zero-grad",
        "has zero_grad drop the gradients instead of filling them with zeros",
        "no zero_grad was called",
        "Only if the program asks for set_to_none=False. It must not read gradients before backward.",
    ),
)


def install_optimizers(applying: Applying, chosen: Mapping[str, str]) -> None:
    if "fuse-optimizer" in chosen:
        with applying.guarded("fuse-optimizer"):
            _Fusing(applying).install()
    if "clip-in-one-pass" in chosen:
        with applying.guarded("clip-in-one-pass"):
            _clip_in_one_pass(applying)
    if "zero-grad" in chosen:
        with applying.guarded("zero-grad"):
            _drop_gradients(applying)


class _Fusing:
    """Fuses each optimizer at its first step, when its parameters are on their device."""

    def __init__(self, applying: Applying) -> None:
        self._applying = applying
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._done: weakref.WeakSet[Any] = weakref.WeakSet()

    def install(self) -> None:
        from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

        self._applying.wrap(Optimizer, "__init__", self._made)
        self._applying.on_remove(partial(guard.unhook, register_optimizer_step_pre_hook(self._steps)))

    def _made(self, original: Any, optimizer: Any, *positional: Any, **named: Any) -> None:
        original(optimizer, *positional, **named)
        self._names[optimizer] = made_here(type(optimizer).__name__)

    @guard.entry
    def _steps(self, optimizer: Any, positional: Any, named: Any) -> None:
        if optimizer in self._done:
            return
        self._done.add(optimizer)
        name = self._names.get(optimizer) or type(optimizer).__name__
        with guard.attempt() as fusing:
            self._fuse(optimizer, name)
        if fusing.error is not None:
            self._applying.could_not("fuse-optimizer", f"{name}: {in_a_line(fusing.error)}")

    def _fuse(self, optimizer: Any, name: str) -> None:
        from stepscope.remedies import fuse_optimizer

        if all(group.get("fused") for group in optimizer.param_groups):
            self._applying.did("fuse-optimizer", f"{name} runs fused as it was made")
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # their message is replaced by the run's own wording
            fused: Any = fuse_optimizer(optimizer)
        if fused is not optimizer:  # a vendor's optimizer with the same groups and state
            optimizer.step = fused.step
        made, reasons = fused.fusion.implementation, "; ".join(fused.fusion.reasons)
        if made in ("unchanged", "mixed"):
            self._applying.could_not("fuse-optimizer", f"{name}: {reasons}")
        elif made == "foreach":
            self._applying.did("fuse-optimizer", f"{name} now updates lists of tensors at once, not fused: {reasons}")
        else:
            self._applying.did("fuse-optimizer", f"{name} now runs {made}")


def _clip_in_one_pass(applying: Applying) -> None:
    import torch

    from stepscope.remedies import clip_grad_norm

    flag = "clip-in-one-pass"

    def clipped(
        original: Any,
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *positional: Any,
        **named: Any,
    ) -> Any:
        place = users_place() or "an unknown place"
        parameters = parameters if isinstance(parameters, torch.Tensor) else list(parameters)
        every = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        why = "it asks for error_if_nonfinite" if error_if_nonfinite else ""
        if any(type(each.grad) is not torch.Tensor for each in every if each.grad is not None):
            why = "gradients are not plain tensors"
        if not why:
            try:
                norm = clip_grad_norm(parameters, max_norm, norm_type)
            except (ValueError, TypeError) as error:  # checked before anything is changed
                why = in_a_line(error)
            else:
                applying.did(flag, f"gradients are clipped in one pass at {place}")
                return norm
        applying.could_not(flag, f"clip_grad_norm_ at {place}: {why}")
        return original(parameters, max_norm, norm_type, error_if_nonfinite, *positional, **named)

    for module in ("torch.nn.utils", "torch.nn.utils.clip_grad"):
        applying.wrap(sys.modules[module], "clip_grad_norm_", clipped)


def _drop_gradients(applying: Applying) -> None:
    """Make zero_grad of optimizers and modules set gradients to None, whatever its argument."""
    import torch

    def cleared(original: Any, owner: Any, set_to_none: bool = True) -> None:
        if set_to_none:
            applying.could_not("zero-grad", "gradients are already set to None")
        else:
            applying.did("zero-grad", f"zero_grad at {users_place() or 'an unknown place'} now sets gradients to None")
        original(owner, set_to_none=True)

    for owner in (torch.optim.Optimizer, torch.nn.Module):
        applying.wrap(owner, "zero_grad", cleared)


_NO_DATA_PARALLEL: Final = "no DistributedDataParallel was made"
DATA_PARALLEL_FLAGS: Final = (
    Flag(
        "bucket-mb",
        "reduces gradients in buckets of N MB",
        _NO_DATA_PARALLEL,
        "The first bucket stays small, so that reducing begins early.",
        Value("N", least=1),
    ),
    Flag(
        "gradient-view",
        "keeps gradients in the buckets that are reduced, instead of copying them there and back",
        _NO_DATA_PARALLEL,
        "The program must not replace or detach gradients in place.",
    ),
    Flag(
        "static-graph",
        "tells DistributedDataParallel that every step uses the same parameters in the same order",
        _NO_DATA_PARALLEL,
        "Only if that is true: otherwise torch ends the program, or gradients are wrong.",
    ),
    Flag(
        "no-find-unused",
        "does not look for parameters without gradients in every step",
        _NO_DATA_PARALLEL,
        "Only if every parameter gets a gradient: otherwise torch ends the program in its second step.",
    ),
)
_ARGUMENTS: Final = {
    "bucket-mb": ("bucket_cap_mb", "reduces gradients in buckets of {value} MB instead of {before}"),
    "gradient-view": ("gradient_as_bucket_view", "keeps gradients in its buckets"),
    "static-graph": ("static_graph", "treats every step's graph as the same"),
    "no-find-unused": ("find_unused_parameters", "does not look for unused parameters"),
}
_DEFAULT_BUCKET_MB: Final = 25
"""Torch's default (documented for DistributedDataParallel)."""


def install_data_parallel(applying: Applying, chosen: Mapping[str, str]) -> None:
    """Apply the flags to every DistributedDataParallel module made from now on."""
    from torch.nn.parallel import DistributedDataParallel

    def tell(module: Any, name: str, said: dict[str, str]) -> None:
        for flag, sentence in said.items():
            applying.did(flag, f"{name} {sentence}")

    applying.replace_constructor(DistributedDataParallel, chosen, lambda arguments: _change(arguments, chosen), tell)


def _change(arguments: dict[str, Any], chosen: Mapping[str, str]) -> dict[str, str]:
    """Change the arguments in place; return the end of a sentence for each flag."""
    said = {}
    for flag, value in chosen.items():
        name, sentence = _ARGUMENTS[flag]
        wanted: Any = {"bucket-mb": float(value or 0), "no-find-unused": False}.get(flag, True)
        before = arguments.get(name)
        if flag == "bucket-mb":
            arguments.pop("bucket_cap_mb_list", None)
            before = _DEFAULT_BUCKET_MB if before is None else before
        elif bool(before) == wanted:
            sentence += " as it was made"
        arguments[name] = wanted
        said[flag] = sentence.format(value=value, before=f"{before:g}" if flag == "bucket-mb" else before)
    return said
