"""Work that fewer operators could do, by the shapes of operators' inputs.

Broadcast products that are summed, one small operator for each of many tensors, a weight merged from thin factors, a
one-hot table times a matrix, a convolution by copied patches, products in the costlier order, a sort for its first
rows, messages along edges, a layer on repeated rows, products with tensors of mostly zeros, and a tensor copied for
each part added to it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, TypeAlias

import numpy as np
import polars as pl

from stepscope.analysis.attribution import SourcePlace
from stepscope.analysis.host import CAUSE_CODES
from stepscope.analysis.work import ARITHMETIC, PLAIN, REDUCTIONS, VIEWS, Shape, base_name, elements, tensor_shapes_of
from stepscope.diagnosis.view import View
from stepscope.trace.nesting import Rows, at, containing
from stepscope.trace.program_facts import SparseFacts

_SPREAD: Final = 4
"""A broadcast result must be this many times as large as its larger input."""
_NEAR: Final = 4
"""Number of operators after a broadcast one within which its result must be summed."""
_POWERS: Final = frozenset({"pow", "square", "abs"})
_FEWEST: Final = 8
"""Fewest tensors in a step that count as a loop over tensors."""
_SHAPES: Final = 3
_MOST: Final = 0.8
_OWN: Final = 0.5
"""Runs of a line for each tensor from which the loop is its own."""
_COMPREHENSIONS: Final = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")
"""Functions whose repetitions cannot be told apart."""
_ALSO: Final = frozenset({"clone", "copy", "lerp", "norm", "linalg_vector_norm", "sum", "zeros_like", "empty_like"})


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Elementwise products (or differences) by broadcasting that are summed right away.

    Attributes:
        kind: "product" for a matrix product, "distance" for sums of powers of differences.
        place: line of the user's code.
        rows: rows of `operators`, forward.
        operations: multiplications and additions that matrix products need for the same result, forward.
        bytes: size of the largest intermediate result at four bytes an element.
    """

    kind: str
    place: int
    rows: Rows
    operations: int
    bytes: int


def broadcast_sums(view: View, called: Rows) -> list[Broadcast]:
    """Find broadcast products and differences whose results are only summed, by line.

    Args:
        called: rows of `operators` that no library operator called, in order.
    """
    operators = view.trace.operators
    names = [base_name(name) for name in operators["name"].gather(called)]
    shapes = [tensor_shapes_of(text) for text in operators["input_shapes"].gather(called)]
    values = operators["input_values"].gather(called)
    place = at(view.attribution.place, view.slices_of_operators(called)).tolist()
    found: defaultdict[tuple[str, int], list[tuple[list[int], int, int]]] = defaultdict(list)
    for first, name in enumerate(names):
        inputs = _before_expansion(names, shapes, first) if name in ("mul", "sub") else ()
        result = _spread(inputs)
        if result is None or place[first] < 0:
            continue
        chain = _summed(names, shapes, first, result)
        kind = "product" if name == "mul" and len(chain) == 2 else "distance" if name == "sub" and chain else ""
        if kind and _contracted(inputs, shapes[chain[-1]], values[chain[-1]]):
            size = elements(result)
            found[kind, place[first]].append(([int(called[one]) for one in chain], 2 * size, 4 * size))
    return [
        Broadcast(kind, number, np.array([row for rows, _, _ in each for row in rows], np.int64),
                  sum(work for _, work, _ in each), max(size for _, _, size in each))
        for (kind, number), each in found.items()
    ]  # fmt: skip


def _before_expansion(names: list[str], shapes: list[tuple[Shape, ...]], first: int) -> tuple[Shape, ...]:
    """Shapes of an operator's two inputs, or of what was expanded (or repeated) to them just before."""
    inputs = shapes[first]
    if len(inputs) != 2 or inputs[0] != inputs[1]:
        return inputs
    before = range(max(first - _NEAR_EXPANSIONS, 0), first)
    sources = [shapes[place][0] for place in before if names[place] in _EXPANDING and shapes[place]]
    fitting = [shape for shape in sources if len(shape) == len(inputs[0]) and _expands(shape, inputs[0])]
    return (fitting[-2], fitting[-1]) if len(fitting) >= 2 else inputs


def _expands(shape: Shape, to: Shape) -> bool:
    return all(size in (1, other) for size, other in zip(shape, to, strict=True)) and shape != to


_NEAR_EXPANSIONS: Final = 6
_EXPANDING: Final = frozenset({"expand", "expand_as", "repeat"})


def _spread(inputs: tuple[Shape, ...]) -> Shape | None:
    """Shape of the result if both inputs are broadcast, each along a dimension of the other, else None."""
    if len(inputs) < 2 or (len(inputs[0]) < 3 and len(inputs[1]) < 3):
        return None
    left, right = _of_rank(inputs, max(len(inputs[0]), len(inputs[1])))
    pairs = list(zip(left, right, strict=True))
    if any(a != b and 1 not in (a, b) for a, b in pairs):
        return None
    is_outer = any(a == 1 < b for a, b in pairs) and any(b == 1 < a for a, b in pairs)
    result = tuple(map(max, pairs))
    return result if is_outer and elements(result) >= _SPREAD * max(elements(left), elements(right)) else None


def _of_rank(inputs: tuple[Shape, ...], rank: int) -> tuple[Shape, Shape]:
    """The first two shapes as broadcasting extends them."""
    left, right = ((1,) * (rank - len(shape)) + shape for shape in inputs[:2])
    return left, right


def _summed(names: list[str], shapes: list[tuple[Shape, ...]], first: int, result: Shape) -> list[int]:
    """Positions from the broadcast operator to the sum of its result; empty if something else follows."""
    chain = [first]
    for position in range(first + 1, min(first + 1 + _NEAR, len(names))):
        if not shapes[position] or shapes[position][0] != result:
            continue
        if names[position] == "sum":
            return [*chain, position]
        if names[position] not in _POWERS:
            return []
        chain.append(position)
    return []


def _contracted(inputs: tuple[Shape, ...], summed: tuple[Shape, ...], values: str | None) -> bool:
    """Whether the summed dimensions, or else the last one, belong to both inputs.

    Args:
        values: the sum's inputs that are no tensors, as recorded: its second names the dimensions.
    """
    if not summed:
        return False
    rank = len(summed[0])
    known = _DIMENSIONS.match(values or "")
    numbers = [int(number) % rank for number in known[1].split(",")] if known and rank else [rank - 1]
    left, right = _of_rank(inputs, rank)
    return all(left[number] == right[number] > 1 for number in numbers)


_DIMENSIONS: Final = re.compile(r'\["", "\[(-?\d+(?:, ?-?\d+)*)\]"')


@dataclass(frozen=True, slots=True)
class OneByOne:
    """A line that runs elementwise operators on many tensors, one after the other.

    Attributes:
        place: line of the user's code.
        rows: rows of `operators`, forward.
        tensors: number of tensors per step.
        elements: total number of elements per step.
        is_penalty: whether their values are reduced and differentiated.
    """

    place: SourcePlace
    rows: Rows
    tensors: int
    elements: int
    is_penalty: bool


def one_by_one(view: View, called: Rows, runs: Mapping[int, float]) -> Iterator[OneByOne]:
    """Find lines that work on many tensors of different shapes one after the other.

    A line that runs less often than it works on tensors calls a library, whose loop it is.

    Args:
        called: rows of `operators` that no library operator called, in order.
        runs: how often a step runs each line, where that is known.
    """
    operators = view.trace.operators
    libraries = [CAUSE_CODES[cause] for cause in ("optimizer", "input", "checkpoint", "logging")]
    called = called[~np.isin(view.activity.cause_of(view.slices_of_operators(called)), libraries)]
    place = at(view.attribution.place, view.slices_of_operators(called))
    table = operators.select("name", "input_shapes")[called].with_columns(
        row=pl.Series(called), place=pl.Series(place), has_backward=pl.Series(_with_backward(view)[called])
    )
    for (number,), mine in table.filter(pl.col("place") >= 0).group_by("place", maintain_order=True):
        names = {base_name(name) for name in mine["name"].unique()}
        if not names <= PLAIN | ARITHMETIC | REDUCTIONS | VIEWS | _ALSO:
            continue
        shapes = [next(iter(tensor_shapes_of(text)), ()) for text in mine["input_shapes"]]
        counts = mine.group_by("name").len()["len"].to_numpy() / view.step_count
        tensors, large = int(counts.max()), [shape for shape in shapes if elements(shape) > 1]
        source = view.attribution.places[int(str(number))]
        is_own = source.function in _COMPREHENSIONS or runs.get(int(str(number)), tensors) >= _OWN * tensors
        if tensors < _FEWEST or len(set(large)) < _SHAPES or not is_own:
            continue
        most = mine.group_by("name").len().sort("len", "name", descending=[True, False])["name"][0]
        sizes = [elements(shape) for shape, name in zip(shapes, mine["name"], strict=True) if name == most]
        is_penalty = not names.isdisjoint(REDUCTIONS | {"norm", "sum"}) and bool(mine["has_backward"].any())
        rows = mine["row"].to_numpy()
        yield OneByOne(source, rows, tensors, sum(sizes) // view.step_count, is_penalty)


def _with_backward(view: View) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether each operator, or one inside it, ran backward."""
    return containing(view.backward_source[view.backward_source >= 0], view.parents)


_PRODUCTS: Final = frozenset({"mm", "matmul", "linear", "addmm"})
_THIN: Final = 4
"""Fewest times that the factors' common size fits into the smaller size of their product."""
_FEWEST_CLASSES: Final = 32
"""Fewest classes of a one-hot table."""
_SHORTER: Final = 8
"""How many times as long as its slice a sorted tensor is."""
_PARTS: Final = frozenset({"slice", "narrow"})
_PASSES: Final = 4
"""Elementwise operators that take as long as finding the largest elements."""
_NEAR_CALLS: Final = 6
"""Number of operators after the first within which the product must come."""


DetourKind: TypeAlias = Literal["merged", "one-hot", "unfold", "order", "sorted", "messages", "tiled"]


@dataclass(frozen=True, slots=True)
class Detour:
    """Operators of one line whose result needs less work.

    Attributes:
        kind: "merged" for a product of two thin matrices that is added to a weight, "one-hot" for a lookup, "unfold"
            for a convolution, "order" for two products in the costlier order, "sorted" for the largest of a sort,
            "messages" for rows that are gathered for each edge, and added up, "tiled" for a layer on repeated rows.
        place: line of the user's code.
        rows: unneeded rows of `operators`, forward.
        operations: operations of the replacing products, forward.
        elements: elements that the replacement moves, forward.
    """

    kind: DetourKind
    place: int
    rows: Rows
    operations: int
    elements: int


@dataclass(frozen=True, slots=True)
class _Called:
    name: str
    inputs: tuple[Shape, ...]


@lru_cache(maxsize=65536)
def _called(name: str, input_shapes: str | None) -> _Called:
    return _Called(base_name(name), tensor_shapes_of(input_shapes))


_Found = tuple[list[int], int, int]
"""Positions of unneeded operators, and the operations and elements of their replacement."""


def detours(view: View, called: Rows) -> Iterator[Detour]:
    operators = view.trace.operators
    calls = [_called(*each) for each in operators.select("name", "input_shapes")[called].iter_rows()]
    place = at(view.attribution.place, view.slices_of_operators(called)).tolist()
    found: defaultdict[tuple[DetourKind, int], list[_Found]] = defaultdict(list)
    for first, call in enumerate(calls):
        if place[first] < 0 or call.name not in _SEARCHES:
            continue
        following = calls[first : first + _NEAR_CALLS]
        for kind, search in _SEARCHES[call.name]:
            if (one := search(following)) is not None:
                found[kind, place[first]].append(([first + position for position in one[0]], *one[1:]))
                break
    for (kind, number), each in found.items():
        rows = called[np.array([one for positions, _, _ in each for one in positions], np.int64)]
        yield Detour(kind, number, rows, sum(work for _, work, _ in each), sum(moved for _, _, moved in each))


def _merged(calls: list[_Called]) -> _Found | None:
    """A product of thin matrices, its scaling and its sum with a weight, if a product then uses the sum."""
    first = calls[0]
    if [len(shape) for shape in first.inputs] != [2, 2]:
        return None
    (height, thin), (_, width) = first.inputs
    result = (height, width)
    if not 0 < thin * _THIN <= min(result):
        return None
    gone = [0]
    for position, call in enumerate(calls[1:], 1):
        if call.name in ("mul", "div") and call.inputs[:1] == (result,) and gone[-1] == position - 1:
            gone.append(position)
        elif call.name in ("add", "sub") and call.inputs[:2] == (result, result):
            rows = next((rows for each in calls[position + 1 :] if (rows := _rows_through(each, result))), None)
            return None if rows is None else ([*gone, position], 2 * rows * thin * (height + width), 3 * rows * width)
    return None


def _rows_through(call: _Called, weight: Shape) -> int | None:
    """Rows that a product multiplies by this weight or its transpose; None for other operators."""
    if call.name not in _PRODUCTS:
        return None
    others = [shape for shape in call.inputs if shape not in (weight, weight[::-1]) and len(shape) > 1]
    if not others or len(call.inputs) < 2 or not {weight, weight[::-1]} & set(call.inputs):
        return None
    length = others[0][-1]
    return elements(others[0]) // length if length in weight and length > 0 else None


def _one_hot(calls: list[_Called]) -> _Found | None:
    """The operators from the making of a one-hot table to its product with a matrix."""
    count = _marked(calls[0])
    if not count:
        return None
    for position, call in enumerate(calls[1:], 1):
        if call.name in _PRODUCTS and len(call.inputs) >= 2:
            table, matrix = call.inputs[:2]
            classes = table[-1] if table else 0
            if (
                classes < _FEWEST_CLASSES
                or elements(table) != count * classes
                or matrix[0] != classes
                or len(matrix) != 2
            ):
                return None
            is_own = calls[0].name == "one_hot" or (*calls[0].inputs[0][:-1], classes) == table
            moved = (2 * count + classes) * matrix[1]
            return (list(range(position + 1)), 0, moved) if is_own else None
    return None


def _unfolded(calls: list[_Called]) -> _Found | None:
    """The copy of all patches of images, and their product with the weights."""
    first = calls[0]
    if len(first.inputs[0]) != 4:
        return None
    images, channels = first.inputs[0][:2]
    for position, call in enumerate(calls[1:], 1):
        if call.name not in _PRODUCTS | {"bmm"} or len(call.inputs) < 2:
            continue
        patches = next((shape for shape in call.inputs if len(shape) == 3 and shape[0] == images), None)
        weights = next((shape for shape in call.inputs if shape != patches), None)
        if patches is None or weights is None:
            return None
        of_a_patch = [size for size in patches[1:] if size > channels and size % channels == 0 and size in weights[-2:]]
        if not of_a_patch:
            return None
        outputs = elements(weights[-2:]) // of_a_patch[0]
        results = elements(patches) // of_a_patch[0] * outputs
        return [0, position], 2 * results * of_a_patch[0], elements(first.inputs[0]) + results
    return None


def _ordered(calls: list[_Called]) -> _Found | None:
    """Two products, one of the other's result, that take less than half the operations in the other order."""
    if len(calls) < 2 or calls[1].name not in _IN_ORDER or any(len(call.inputs) != 2 for call in calls[:2]):
        return None
    (left, right), (before, after) = calls[0].inputs, calls[1].inputs
    shapes = (left, right, before, after)
    if any(len(shape) < 2 for shape in shapes) or left[-1] != right[-2]:
        return None
    batch, (height, inner), width = elements(left[:-2]), left[-2:], right[-1]
    if before[-2:] == (height, width) and elements(before[:-2]) == batch and after[-2] == width:
        further = after[-1]  # (a b) c
        now, other = height * width * (inner + further), inner * further * (width + height)
    elif after[-2:] == (height, width) and elements(after[:-2]) == batch and before[-1] == height:
        further = before[-2]  # c (a b)
        now, other = height * width * (inner + further), further * inner * (height + width)
    else:
        return None
    return ([0, 1], 2 * batch * other, 0) if 2 * other < now else None


def _sorted(calls: list[_Called]) -> _Found | None:
    """A sort of which a slice is taken that is much shorter."""
    first = calls[0]
    if not first.inputs:
        return None
    whole = first.inputs[0]
    sliced = next((place for place, call in enumerate(calls) if call.name in _PARTS and call.inputs[:1] == (whole,)), 0)
    for call in calls[sliced + 1 :] if sliced else ():
        alike = [shape for shape in call.inputs if len(shape) == len(whole) and _differences(shape, whole) <= 1]
        if alike:
            is_short = max(map(elements, alike)) * _SHORTER <= elements(whole)
            return ([0], 0, _PASSES * elements(whole)) if is_short else None
    return None


def _tiled(calls: list[_Called]) -> _Found | None:
    """Rows that are repeated, joined with others along the last dimension, and given to one layer."""
    place = next((place for place, call in enumerate(calls) if call.name == "cat"), 0)
    layer = next((at for at, call in enumerate(calls) if at > place > 0 and call.name in ("linear", "matmul")), 0)
    parts, inputs = calls[place].inputs, calls[layer].inputs
    if not layer or len(inputs) < 2 or len(parts) < 2 or len(inputs[1]) != 2:
        return None
    whole, rows = inputs[0], elements(inputs[0][:-1])
    width = elements(inputs[1]) // max(whole[-1], 1)
    if sum(part[-1] for part in parts) != whole[-1] or any(elements(part[:-1]) != rows for part in parts):
        return None
    repeated = [at for at, call in enumerate(calls[:place]) if call.name in _EXPANDING and call.inputs]
    sources = {calls[at].inputs[0][-1]: elements(calls[at].inputs[0][:-1]) for at in repeated}
    left = sum(min(sources.get(part[-1], rows), rows) * part[-1] * width for part in parts)
    if 2 * left > rows * whole[-1] * width:
        return None
    return [*repeated, place, layer], 2 * left, 2 * rows * width


def _messages(calls: list[_Called]) -> _Found | None:
    """Rows of a table gathered for each of many edges, perhaps weighted, and added up by their target."""
    first = calls[0]
    if not first.inputs or len(first.inputs[0]) != 2:
        return None
    width = first.inputs[0][1]
    added = next((place for place, call in enumerate(calls) if call.name in ("index_add", "scatter_add")), 0)
    if not added or len(calls[added].inputs) < 2:
        return None
    rows = calls[added].inputs[-1]
    if len(rows) != 2 or rows[1] != width or rows[0] <= calls[added].inputs[0][0]:
        return None
    weighted = [place for place, call in enumerate(calls[:added]) if call.name == "mul" and rows in call.inputs[:2]]
    return [0, *weighted, added], 0, elements(rows)


def _differences(shape: Shape, other: Shape) -> int:
    return sum(size != before for size, before in zip(shape, other, strict=True))


def _marked(call: _Called) -> int:
    """Number of rows of the one-hot table that an operator makes; 0 if it makes none."""
    if call.name == "one_hot" and call.inputs:
        return elements(call.inputs[0])
    if call.name == "scatter" and len(call.inputs) == 2 and call.inputs[1][-1] == 1:  # a single number
        return elements(call.inputs[1])
    if call.name == "eq" and len(call.inputs) == 2 and call.inputs[0][-1] == 1 and len(call.inputs[1]) == 1:
        return elements(call.inputs[0]) if elements(call.inputs[0]) != call.inputs[1][0] else 0
    return 0


_Search = Callable[[list[_Called]], _Found | None]
_IN_ORDER: Final = ("mm", "bmm", "matmul")
_BEGINNINGS: Final[tuple[tuple[DetourKind, _Search, tuple[str, ...]], ...]] = (
    ("merged", _merged, ("mm", "matmul")),
    ("one-hot", _one_hot, ("one_hot", "scatter", "eq")),
    ("unfold", _unfolded, ("im2col",)),
    ("order", _ordered, _IN_ORDER),
    ("sorted", _sorted, ("sort", "argsort", "msort")),
    ("messages", _messages, ("index", "index_select")),
    ("tiled", _tiled, tuple(_EXPANDING)),
)
"""Names of the operators that each kind of detour begins with."""
_SEARCHES: Final[Mapping[str, tuple[tuple[DetourKind, _Search], ...]]] = {
    name: tuple((kind, search) for kind, search, names in _BEGINNINGS if name in names)
    for name in {name for _, _, names in _BEGINNINGS for name in names}
}
_SPARSE_RATE: Final = 10
"""How much longer a multiplication takes in a sparse product than in a dense one."""


@dataclass(frozen=True, slots=True)
class SparseProduct:
    """Products with a tensor of mostly zeros.

    Attributes:
        facts: the tensor; where several lines use it, of the first.
        rows: rows of `operators`, forward.
        operations: of sparse products with the same result, forward, as dense ones would take as long.
        elements: of the results.
        weight: elements of the other inputs, whose gradients are dense.
    """

    facts: SparseFacts
    rows: Rows
    operations: int
    elements: int
    weight: int


def sparse_products(view: View, called: Rows) -> Iterator[SparseProduct]:
    """Find products with tensors that were mostly zeros when the recorder looked; those with one tensor together.

    Args:
        called: rows of `operators` that no library operator called, in order.
    """
    alike: defaultdict[tuple[Shape, int], list[SparseFacts]] = defaultdict(list)
    for facts in view.program.sparse:
        alike[facts.shape, facts.nonzero].append(facts)
    if not alike:
        return
    numbers = {(each.file, each.line): number for number, each in enumerate(view.attribution.places)}
    operators = view.trace.operators
    names = np.array([base_name(name) in _PRODUCTS | {"bmm"} for name in operators["name"].gather(called)], np.bool_)
    products = called[names]
    place = at(view.attribution.place, view.slices_of_operators(products))
    for (shape, nonzero), same in alike.items():
        lines = [numbers[each.file, each.line] for each in same if (each.file, each.line) in numbers]
        mine = np.flatnonzero(np.isin(place, lines))
        sizes = [_width(shape, tensor_shapes_of(text)) for text in operators["input_shapes"].gather(products[mine])]
        found = [(position, *size) for position, size in zip(mine.tolist(), sizes, strict=True) if size is not None]
        if found:
            chosen = np.array([position for position, *_ in found], np.int64)
            yield SparseProduct(
                same[0], products[chosen],
                sum(2 * nonzero * width * _SPARSE_RATE for _, width, _, _ in found),
                sum(results for _, _, results, _ in found),
                sum(weight for _, _, _, weight in found),
            )  # fmt: skip


def _width(sparse: Shape, shapes: tuple[Shape, ...]) -> tuple[int, int, int] | None:
    """By how many numbers a product multiplies an element of a tensor of this shape, and elements of result and other
    input; None if it has no such input.
    """
    left = [shape for shape in shapes if len(shape) > 1]
    mine = next((shape for shape in left if elements(shape) == elements(sparse)), None)
    if mine is None or len(left) < 2:
        return None
    left.remove(mine)
    other = max(left, key=elements)
    shared = next((size for size in (mine[-1], mine[-2]) if size in other[-2:]), 0)
    if not shared:
        return None
    width = other[-2] * other[-1] // shared
    return width, elements(mine) // shared * width, elements(other)


@dataclass(frozen=True, slots=True)
class Appended:
    """Concatenations of one line, each of the result of the one before with a new part.

    Attributes:
        place: line of the user's code.
        rows: rows of `operators`, forward.
        left: part of the elements that one concatenation of all parts moves, 0 to 1.
    """

    place: int
    rows: Rows
    left: float


def appended(view: View, called: Rows) -> Iterator[Appended]:
    """Find lines that extend a tensor by `cat`, again and again within a step.

    Args:
        called: rows of `operators` that no library operator called, in order.
    """
    operators = view.trace.operators
    names = operators["name"].gather(called)
    cats = called[(names.str.contains(r"::(cat|hstack|vstack|concat|concatenate)$")).to_numpy()]
    place = at(view.attribution.place, view.slices_of_operators(cats))
    step = np.searchsorted(view.steps["start_ns"].to_numpy(), operators["start_ns"].to_numpy()[cats], side="right")
    runs: defaultdict[int, list[tuple[Rows, int, int]]] = defaultdict(list)
    for number, mine in pl.DataFrame({"row": cats, "place": place, "step": step}).group_by("place", "step"):
        rows = np.sort(mine["row"].to_numpy())
        inputs = [[elements(shape) for shape in tensor_shapes_of(text)] for text in operators["input_shapes"][rows]]
        results = [sum(sizes) for sizes in inputs]
        grows = [before in sizes and before < sum(sizes) for before, sizes in zip(results, inputs[1:], strict=False)]
        if int(str(number[0])) >= 0 and len(rows) >= _FEWEST and sum(grows) >= _MOST * (len(rows) - 1):
            runs[int(str(number[0]))].append((rows, max(results), sum(results)))
    for line, found in runs.items():
        moved = sum(moved for _, _, moved in found)
        left = sum(last for _, last, _ in found) / max(moved, 1)
        yield Appended(line, np.concatenate([rows for rows, _, _ in found]), left)
