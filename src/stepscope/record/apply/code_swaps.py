"""Replace a loss that the user's loop computes position by position with one batched computation.

The function that contains the loop gets the code compiled from its rewritten source, from its next call on. Lines
keep their numbers, so that tracebacks and profiles refer to the user's file. A function is left alone if its file has
changed since it was compiled. Loops that are already running are served losses from one batched computation.
"""

from __future__ import annotations

import ast
import builtins
import gc
import io
import os
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import CodeType, FrameType, FunctionType
from typing import Any, ClassVar, Final

from stepscope import guard
from stepscope.guard import attempt, entry
from stepscope.record.apply.flags import Flag
from stepscope.record.apply.patching import PACKAGE, Applying, in_a_line, is_users_file
from stepscope.record.equal_values import locals_of
from stepscope.remedies.rewrites import Criterion, Edit, Positions, Rewrite, rewrites_of, rewritten
from stepscope.remedies.rewrites.context import SourceText, StatementPlace

_NAME: Final = "__stepscope_holds__"
"""Name of the guard as a built-in that the new code calls: visible in every module, listed in none."""

Holds = Callable[[Rewrite, list[Any], Any], bool]


class NotGuarded(Exception):
    """Why the choice between old and new code cannot be guarded; the message completes a sentence."""


class Guard:
    """The run-time check in the new code: whether a rewrite's assumptions hold for its tensors and its criterion."""

    _rewrites: ClassVar[list[Rewrite]] = []
    """Indexed by the numbers in the new code objects, which outlive the guard that was installed first."""

    def __init__(self, holds: Holds) -> None:
        self._holds = holds

    @entry(otherwise=False)
    def __call__(self, number: int, *values: Any) -> bool:
        """Whether the assumptions of rewrite `number` hold for these tensors and the criterion, which comes last."""
        with attempt():
            return self._holds(self._rewrites[number], list(values[:-1]), values[-1])
        return False  # run the original statement

    def question(self, rewrite: Rewrite) -> str:
        """Return the source text of the call that makes the check."""
        self._rewrites.append(rewrite)
        values = [each.expression for each in rewrite.expected]
        values.append(rewrite.criterion.expression if rewrite.criterion is not None else "None")
        return f"{_NAME}({len(self._rewrites) - 1}, {', '.join(values)})"

    def install(self) -> None:
        setattr(builtins, _NAME, self)


def guarded(
    source: str, rewrites: Sequence[Rewrite], guard: Guard, keep_lines: Callable[[ast.AST], None]
) -> ast.Module:
    """Return the syntax tree where each rewritten statement is guarded: new form if the guard holds, else the old.

    Args:
        keep_lines: sets line numbers of the original source on the rewritten nodes.

    Raises NotGuarded if a rewrite changes more than one statement.
    """
    before, after = SourceText(source), SourceText(rewritten(source, rewrites))
    olds = {before.span(place.statement)[0]: place for place in before.places()}
    news = list(after.places())
    chosen = [_new_statements(before, after, olds, news, each, rewrites) for each in rewrites]
    keep_lines(after.tree)
    for rewrite, (block, first, count, old) in sorted(
        zip(rewrites, chosen, strict=True), key=lambda each: each[1][1], reverse=True
    ):
        question = ast.parse(guard.question(rewrite), mode="eval").body
        choice = ast.copy_location(ast.If(question, list(block[first : first + count]), [old]), old)
        for node in ast.walk(question):
            ast.copy_location(node, old)
        block[first : first + count] = [choice]  # type: ignore[index]
    return after.tree


def _new_statements(
    before: SourceText,
    after: SourceText,
    olds: dict[int, StatementPlace],
    news: Sequence[StatementPlace],
    rewrite: Rewrite,
    rewrites: Sequence[Rewrite],
) -> tuple[Sequence[ast.stmt], int, int, ast.stmt]:
    """Return the block, position and count of the statements that replace the old one, and the old statement."""
    place = olds.get(rewrite.edits[0].start)
    if place is None:
        raise NotGuarded("its losses are used by other statements, too")
    start, end = before.span(place.statement)
    if any(not start <= edit.start <= edit.end <= end for edit in rewrite.edits):
        raise NotGuarded("its losses are used by other statements, too")
    edits = [edit for each in rewrites for edit in each.edits]
    moved = start + sum(
        len(edit.text) - (edit.end - edit.start) for edit in edits if edit.end <= start and edit.start < start
    )
    grown = sum(len(edit.text) - (edit.end - edit.start) for edit in rewrite.edits)
    inside = [
        each
        for each in news
        if moved <= after.span(each.statement)[0] and after.span(each.statement)[1] <= moved + end - start + grown
    ]
    first = min(inside, key=lambda each: after.span(each.statement)[0])
    count = sum(each.block is first.block for each in inside)
    return first.block, first.index, count, place.statement


_LARGEST_BYTES: Final = 4 * 2**20


class NotSwapped(Exception):
    """Why a function keeps its code; the message completes a sentence."""


@lru_cache(maxsize=256)
def source_of(file: str) -> str | None:
    """Read a source file; None if it is missing, very large or not text."""
    path = os.path.abspath(file)
    if file.startswith("<") or not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") as opened:
            data = opened.read(_LARGEST_BYTES + 1)
        if len(data) > _LARGEST_BYTES:
            return None
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        return io.TextIOWrapper(io.BytesIO(data), encoding).read()
    except (OSError, SyntaxError, UnicodeError):
        return None


@lru_cache(maxsize=256)
def rewrites_in(file: str, kind: str) -> tuple[Rewrite, ...]:
    """Return the rewrites of one kind in a file; empty if it cannot be read."""
    source = source_of(file)
    if source is None:
        return ()
    try:
        return tuple(rewrites_of(source, names=[kind]))
    except ValueError:
        return ()


def swap(code: CodeType, rewrites: Sequence[Rewrite], guard: Guard) -> CodeType:
    """Give all live functions with this code object the rewritten code; return the new code object.

    Raises NotSwapped if the functions keep their code.
    """
    new = rewritten_code(code, rewrites, guard)
    functions = [each for each in gc.get_referrers(code) if isinstance(each, FunctionType) and each.__code__ is code]
    if not functions:
        raise NotSwapped("no function that runs this code was found")
    for function in functions:
        function.__code__ = new
    return new


def rewritten_code(code: CodeType, rewrites: Sequence[Rewrite], guard: Guard) -> CodeType:
    """Compile the source of a code object after the rewrites, each guarded.

    Raises NotSwapped if the file has changed since it was compiled, or the new code does not fit the function.
    """
    source = _current_source(code)
    lines = _old_lines(source, [edit for rewrite in rewrites for edit in rewrite.edits])
    try:
        tree = guarded(source, rewrites, guard, lambda each: _keep_lines(each, lines))
    except NotGuarded as error:
        raise NotSwapped(str(error)) from error
    new = _same_place(compile(tree, code.co_filename, "exec", dont_inherit=True), code)
    for name in ("co_freevars", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount"):
        if new is None or getattr(new, name) != getattr(code, name):
            raise NotSwapped("its new code would need other enclosing variables")
    assert new is not None
    count = code.co_argcount + code.co_kwonlyargcount
    if new.co_varnames[:count] != code.co_varnames[:count] or (new.co_flags ^ code.co_flags) & ~_NESTED:
        raise NotSwapped("its new code would have another signature")
    return new


_NESTED: Final = 0x10


def is_current(code: CodeType) -> bool:
    try:
        _current_source(code)
    except NotSwapped:
        return False
    return True


def _current_source(code: CodeType) -> str:
    source = source_of(code.co_filename)
    if source is None:
        raise NotSwapped("its file cannot be read")
    module = compile(source, code.co_filename, "exec", dont_inherit=True)
    if (module if code.co_name == "<module>" else _same_place(module, code)) != code:
        raise NotSwapped("its file is not the one that runs")
    return source


def _same_place(module: CodeType, code: CodeType) -> CodeType | None:
    """Find the code object of the same name and first line in a module; None if there is none or more than one."""
    found = [
        each for each in _codes(module) if (each.co_name, each.co_firstlineno) == (code.co_name, code.co_firstlineno)
    ]
    return found[0] if len(found) == 1 else None


def _codes(module: CodeType) -> Iterator[CodeType]:
    todo = [module]
    while todo:
        code = todo.pop()
        yield code
        todo += [each for each in code.co_consts if isinstance(each, CodeType)]


def _old_lines(source: str, edits: Sequence[Edit]) -> list[int]:
    """Map each line after the edits to its line before; both count from 1, and entry 0 is unused."""
    lines, old, position = [0, 1], 1, 0
    for edit in sorted(edits):
        for _ in range(source.count("\n", position, edit.start)):
            old += 1
            lines.append(old)
        last = old + source.count("\n", edit.start, edit.end)
        for number in range(1, edit.text.count("\n") + 1):
            lines.append(min(old + number, last))
        old, position = last, edit.end
        lines[-1] = max(lines[-1], min(old, last)) if edit.end == edit.start else lines[-1]
    for _ in range(source.count("\n", position)):
        old += 1
        lines.append(old)
    return lines


def _keep_lines(tree: ast.AST, lines: Sequence[int]) -> None:
    """Give every node of the rewritten source its original line number."""
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.stmt | ast.excepthandler | ast.arg | ast.keyword | ast.alias | ast.pattern):
            node.lineno = lines[min(node.lineno, len(lines) - 1)]
            if node.end_lineno is not None:
                node.end_lineno = max(lines[min(node.end_lineno, len(lines) - 1)], node.lineno)
                if node.end_lineno == node.lineno and node.end_col_offset is not None:
                    node.end_col_offset = max(node.end_col_offset, node.col_offset)


_INNER = ("<listcomp>", "<genexpr>")


def function_frame(frame: FrameType) -> FrameType:
    """Return the frame of the function or module around a comprehension; any other frame is returned unchanged."""
    while frame.f_code.co_name in _INNER and frame.f_back is not None:
        frame = frame.f_back
    return frame


class ServedPositions:
    """Losses of one loop, computed in one batch and recomputed whenever the tensors change.

    Args:
        file: the file that contains the loop.

    Attributes:
        loops: how often the loop was served from its first position to its last.
    """

    def __init__(self, rewrite: Rewrite, positions: Positions, file: str) -> None:
        self.rewrite = rewrite
        self.place = f"{os.path.basename(file)}:{rewrite.line}"
        self.loops = 0
        self._positions = positions
        self._prepare = compile(positions.statements, "<stepscope>", "exec")
        self._compute = compile(positions.losses, "<stepscope>", "eval")
        self._expected = [compile(each.expression, "<stepscope>", "eval") for each in rewrite.expected]
        self._losses: tuple[Any, ...] = ()
        self._of: tuple[Any, ...] = ()
        self._next = 0

    def loss(self, frame: FrameType) -> Any:
        """Return the loss for the call in this frame; None if the call must compute it itself."""
        around = function_frame(frame)
        local = locals_of(around)
        place = (local if frame is around else locals_of(frame))[self._positions.variable] - self._positions.start
        tensors = [eval(each, around.f_globals, local) for each in self._expected]
        of = tuple((id(each), getattr(each, "_version", 0)) for each in tensors)
        if place == 0:
            if not is_right(self.rewrite, tensors, self._criterion(around, local)):
                return None
            names = {**around.f_globals, **local}
            exec(self._prepare, names)
            losses = eval(self._compute, names)
            self._losses, self._of, self._next = losses.unbind(), (of, tensors), 0
        if not self._of or of != self._of[0] or place != self._next or place >= len(self._losses):
            self._forget()
            return None
        found = self._losses[place]
        self._next += 1
        if self._next == len(self._losses):
            self.loops += 1
            self._forget()
        return found

    def _criterion(self, frame: FrameType, local: Any) -> Any:
        criterion = self.rewrite.criterion
        return None if criterion is None else eval(criterion.expression, frame.f_globals, local)

    def _forget(self) -> None:
        """Release the tensors, so that no graph lives longer than in the original program."""
        self._losses, self._of, self._next = (), (), 0


def is_right(rewrite: Rewrite, tensors: list[Any], criterion: Any) -> bool:
    """Whether a rewrite's assumptions hold: the logits, targets that are valid class numbers, and the criterion."""
    import torch

    if rewrite.criterion is not None and not _is_as_taken(rewrite.criterion, criterion):
        return False

    if len(tensors) != 2 or not all(isinstance(value, torch.Tensor) for value in tensors):
        return False
    logits, targets = tensors
    fitting = all(value.dim() in each.dimensions for value, each in zip(tensors, rewrite.expected, strict=True))
    if not fitting or logits.dim() != targets.dim() + 1 or targets.is_floating_point():
        return False
    # Without a number of positions, the loop zips both and ends with the shorter one.
    return rewrite.positions is not None or sorted(logits.shape[:-1]) == sorted(targets.shape)


def _is_as_taken(taken: Criterion, criterion: Any) -> bool:
    """Whether a criterion is torch's own, has the assumed reduction, and sets no option that the rewrite ignores."""
    import torch

    if type(criterion) is not getattr(torch.nn, taken.kind) or criterion.reduction != taken.reduction:
        return False
    defaults = {"weight": None, "ignore_index": -100, "label_smoothing": 0.0}
    if criterion._forward_hooks or criterion._forward_pre_hooks or criterion._backward_hooks:
        return False
    values = {name: getattr(criterion, name, default) for name, default in defaults.items() if name not in taken.other}
    return values.get("weight") is None and all(values[name] == defaults[name] for name in values.keys() - {"weight"})


_BATCHED: Final = "batched-loss"
_DIFF: Final = "stepscope diagnose --diff shows the change"
BATCHING_FLAGS: Final = (
    Flag(
        _BATCHED,
        "computes in one batch a loss that a loop sums up position by position",
        "no loop over positions that only adds up their cross entropy was seen",
        "The page of rewrites says what is recognised. A function gets new code from its second call on; a loop that "
        "is already running, or is outside any function, gets losses that were computed together.",
    ),
)


def install_batching(applying: Applying, chosen: Mapping[str, str]) -> None:
    import torch.nn.functional

    batching = _Batching(applying)
    for name in ("cross_entropy", "nll_loss"):
        applying.wrap(torch.nn.functional, name, batching.called)
    applying.at_end(batching.end)


class _Batching:
    """Inspects the caller of each loss once, and replaces its function's code if the result is the same."""

    def __init__(self, applying: Applying) -> None:
        import torch

        self._applying = applying
        self._not_users = (os.path.dirname(torch.__file__) + os.sep, PACKAGE)
        self._compiling = getattr(torch.compiler, "is_compiling", lambda: False)
        self._judged: dict[int, CodeType] = {}
        """By id; the references keep the ids valid."""
        self._guard = Guard(is_right)
        self._guard.install()
        self._new: list[CodeType] = []
        self._waiting: dict[int, tuple[str, int]] = {}
        """Maps the id of new code to the function that has it from its next call on, and that function's old code."""
        self._served: dict[int, list[ServedPositions]] = {}
        """Maps the id of calling code to its loops that are already running."""

    def called(self, original: Any, *positional: Any, **named: Any) -> Any:
        """Inspect the caller of a loss the first time it appears."""
        if self._compiling():
            return original(*positional, **named)
        frame = self._caller()
        if frame is not None and id(frame.f_code) not in self._judged:
            with self._applying.guarded(_BATCHED):
                self._judge(frame)
        loss = None
        if frame is not None and id(frame.f_code) in self._served:
            with self._applying.guarded(_BATCHED):
                loss = self._serve(frame)
        return original(*positional, **named) if loss is None else loss

    def end(self) -> None:
        """Report the outcome for functions that were called only once."""
        for loops in self._served.values():
            for served in loops:
                if served.loops:
                    self._say_served(served)
        for name, before in self._waiting.values():
            if not any(served.loops for served in self._served.get(before, ())):
                self._applying.could_not(_BATCHED, f"{name} was not called again; {_DIFF}")

    def _caller(self) -> FrameType | None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(self._not_users):
            frame = frame.f_back
        return frame

    def _judge(self, frame: FrameType) -> None:
        code = frame.f_code
        self._judged[id(code)] = code
        if id(code) in self._waiting:
            name, before = self._waiting.pop(id(code))
            self._served.pop(before, None)
            self._applying.did(_BATCHED, f"{name} computes its loss for all positions at once")
            return
        around, line = function_frame(frame), frame.f_lineno
        file = around.f_code.co_filename
        if not is_users_file(file):
            return
        rewrite = next((each for each in rewrites_in(file, _BATCHED) if each.line <= line <= each.last_line), None)
        if rewrite is not None:
            self._change(frame, around, rewrite)

    def _change(self, frame: FrameType, around: FrameType, rewrite: Rewrite) -> None:
        code = around.f_code
        place = f"{os.path.basename(code.co_filename)}:{rewrite.line}"
        name = f"{rewrite.function} ({place})" if rewrite.function else f"the loop at {place}"
        if not _is_right(rewrite, around):
            what = " and ".join(dict.fromkeys(each.expression for each in rewrite.expected))
            self._applying.could_not(_BATCHED, f"{name}: {what} are not what the new code needs; see its assumptions")
            return
        others = [each for each in rewrites_in(code.co_filename, _BATCHED) if each.function == rewrite.function]
        is_rechecked = any(each.criterion is not None and each.criterion.is_argument for each in others)
        if code.co_name != "<module>" and not is_rechecked:
            try:
                new = swap(code, [each for each in others if each is rewrite or _is_right(each, around)], self._guard)
                self._new.append(new)
                self._waiting[id(new)] = (name, id(frame.f_code))
            except NotSwapped as error:
                if rewrite.positions is None or not is_current(code):
                    self._applying.could_not(_BATCHED, f"{name}: {error}; {_DIFF}")
                    return
        elif not is_current(code):
            self._applying.could_not(_BATCHED, f"{name}: its file is not the one that runs; {_DIFF}")
            return
        self._served[id(frame.f_code)] = [
            ServedPositions(each, each.positions, code.co_filename) for each in others if each.positions is not None
        ]

    def _serve(self, frame: FrameType) -> Any:
        """Return the loss from the batched computation, if there is one."""
        for served in self._served[id(frame.f_code)]:
            if served.rewrite.line <= frame.f_lineno <= served.rewrite.last_line:
                with guard.attempt() as serving:
                    loss = served.loss(frame)
                if serving.error is not None:  # the loop then computes every loss itself
                    self._served.pop(id(frame.f_code))
                    self._applying.could_not(_BATCHED, in_a_line(serving.error))
                    return None
                if served.loops == 2 and loss is not None:  # by one call of its function, which may be the only call
                    self._say_served(served)
                return loss
        return None

    def _say_served(self, served: ServedPositions) -> None:
        self._applying.did(_BATCHED, f"the loop at {served.place} takes the losses of its positions from one call")


def _is_right(rewrite: Rewrite, frame: FrameType) -> bool:
    with guard.attempt():
        # The user's own expressions: names, attributes of them and items by a literal.
        local = locals_of(frame)
        values = [eval(each.expression, frame.f_globals, local) for each in rewrite.expected]
        criterion = rewrite.criterion
        called = None if criterion is None else eval(criterion.expression, frame.f_globals, local)
        return is_right(rewrite, values, called)
    return False
