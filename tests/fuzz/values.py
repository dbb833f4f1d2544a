"""Damage to trees of plain values: what JSON, msgpack and the pickle of a memory snapshot hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

SCRIPT = "<script>planted()</script>"
TEXTS = (
    "",
    " ",
    SCRIPT,
    '"><img src=x onerror=planted()>',
    "\x1b[31m\x1b]0;planted\x07",
    "a\nb\rc\td",
    "\x00",
    "\x7f\x9b31m",
    "\ud800",
    "\u202eesrever\u2066",
    "=1+1",
    "</script><!--",
    "x" * 5000,
    "é\U0001f600" * 40,
    "nan",
    "-inf",
    "1e999",
    "[[[[",
    "%s%n{0}{a.b}",
    "../../../etc/passwd",
    "None",
    "aten::mm",
    "ProfilerStep#1",
    "ProfilerStep#99999999999999999999",
    "Optimizer.step#SGD.step",
    "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
    "train.py(99999999999): step",
    "ncclKernel_AllReduce",
    "Memcpy DtoH (Device -> Pageable)",
    "[[1, 2], [3, 4]]",
    "autograd::engine::evaluate_function: MmBackward0",
    "cudaStreamSynchronize",
)
NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 7, -0.0, 0.5, -0.001, 1e-9, 1e-400, 1e9, 1e18, 1e308, -1e308),
    *(sign * (2**bits + more) for bits in (31, 32, 53, 62, 63, 64) for more in (-1, 0, 1) for sign in (1, -1)),
    *(10**30, -(10**30), float("nan"), float("inf"), float("-inf")),
)
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"a": {"b": [1]}},
    [1, 2, 3],
    ["a", 1.5],
)

Slot = tuple[Any, Any]
"""A container and the key or index of a value in it."""


def scalar(random: Random) -> Any:
    """A value that no profiler writes there."""
    return random.choice(random.choice((TEXTS, NUMBERS, NUMBERS, OTHERS)))


def slots(tree: Any) -> list[Slot]:
    """Every place in a tree, each container once."""
    found: list[Slot] = []
    open_, seen = [tree], {id(tree)}
    while open_:
        holder = open_.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            found.append((holder, key))
            value = holder[key]
            if isinstance(value, (dict, list)) and id(value) not in seen:
                seen.add(id(value))
                open_.append(value)
    return found


def near(random: Random, value: Any) -> Any:
    """A value that is like another one."""
    if isinstance(value, bool) or value is None:
        return scalar(random)
    if isinstance(value, (int, float)):
        by = random.choice((-1, 1, -value, value, value * 999, 0.5, -1000, 1000, 2**31, 2**63))
        return random.choice((value + by, -value, str(value), [value], f"{value}x"))
    if isinstance(value, str):
        cut = random.randint(0, len(value))
        other = random.choice(TEXTS)
        return random.choice((value[:cut], value[:cut] + other + value[cut:], value.upper(), value * 3, [value], cut))
    if isinstance(value, bytes):
        cut = random.randint(0, len(value))
        return random.choice((value[:cut], value[:cut] + bytes([random.randrange(256)]) + value[cut + 1 :], value * 2))
    if isinstance(value, (list, tuple)):
        value = list(value)
        return random.choice((value * 2, value[::-1], value[: len(value) // 2], {"0": value}, value[:1]))
    return random.choice((list(value.values()), list(value), [value], {}))


def _replace(random: Random, places: list[Slot]) -> None:
    holder, key = random.choice(places)
    holder[key] = scalar(random)


def _change(random: Random, places: list[Slot]) -> None:
    holder, key = random.choice(places)
    holder[key] = near(random, holder[key])


def _delete(random: Random, places: list[Slot]) -> None:
    holder, key = random.choice(places)
    if isinstance(holder, dict):
        holder.pop(key, None)
    else:
        del holder[key : key + random.choice((1, 1, 5))]


def _duplicate(random: Random, places: list[Slot]) -> None:
    holder, key = random.choice(places)
    if isinstance(holder, dict):
        holder[f"{_AGAIN}{key}"] = random.choice((holder[key], scalar(random)))
    else:
        holder.insert(random.randint(0, len(holder)), holder[key])


def _reorder(random: Random, places: list[Slot]) -> None:
    holder, key = random.choice(places)
    if isinstance(holder, list):
        random.shuffle(holder) if random.random() < 0.3 else holder.insert(0, holder.pop(key))
    else:
        items = list(holder.items())
        random.shuffle(items)
        holder.clear()
        holder.update(items)


def _same(places: list[Slot], key: Any) -> list[Slot]:
    return [place for place in places if place[1] == key and place[1] in place[0]]


def _borrow(random: Random, places: list[Slot]) -> None:
    """Another's value of the same key: cyclic parents, foreign flows, times that go backwards, odd pairs."""
    holder, key = random.choice(places)
    if isinstance(holder, dict) and key in holder:
        other, _ = random.choice(_same(places, key))
        holder[key], other[key] = other[key], random.choice((holder[key], other[key]))


def _everywhere(random: Random, places: list[Slot]) -> None:
    """One change to all values of a key: all times the same, no durations, texts for numbers."""
    holder, key = random.choice(places)
    if not isinstance(holder, dict) or key not in holder:
        return
    same, value, share = _same(places, key), scalar(random), random.choice((1.0, 1.0, 0.5))
    how = random.choice(("value", "own", "delete", "offset", "counted", "near"))
    for number, (each, _) in enumerate(same):
        old = each[key]
        if random.random() > share:
            continue
        if how == "delete":
            del each[key]
        elif how == "own":
            each[key] = str(old) if isinstance(old, (int, float)) else scalar(random)
        elif how == "offset" and isinstance(old, (int, float)) and not isinstance(old, bool):
            each[key] = old + random.choice((-(10**6), 10**6, 10**12, -old, 0.0001))
        elif how == "counted":
            each[key] = number
        elif how == "near":
            each[key] = near(random, old)
        else:
            each[key] = value


def _nest(random: Random, places: list[Slot]) -> None:
    holder, key = random.choice(places)
    value = holder[key]
    for _ in range(random.choice((1, 3, 40, 120))):
        value = [value] if random.random() < 0.5 else {"a": value}
    holder[key] = value


def _graft(random: Random, places: list[Slot]) -> None:
    """A value of one place at another."""
    (holder, key), (other, there) = random.choice(places), random.choice(places)
    if isinstance(other[there], (dict, list)):
        other[there] = json.loads(json.dumps(other[there], default=str, skipkeys=True))
    holder[key] = other[there]


def _plant(random: Random, places: list[Slot]) -> None:
    """Hostile texts in many places at once, so that some reach every report."""
    share, planted = random.choice((0.05, 0.5, 1.0)), random.choice((TEXTS, TEXTS[:12], (SCRIPT,)))
    for holder, key in places:
        if isinstance(holder[key], str) and key not in ("ph", "cat") and random.random() < share:
            holder[key] = random.choice((random.choice(planted), holder[key] + random.choice(planted)))


def _phase(random: Random, places: list[Slot]) -> None:
    """Begin and end in place of a complete event, or either without the other."""
    events = [place for place in places if place[1] == "ph" and isinstance(place[0], dict)]
    if not events:
        return
    for holder, _ in random.sample(events, min(len(events), random.choice((1, 2, 8)))):
        holder["ph"] = random.choice("XBEbenstfiICMPNODvR(") if random.random() < 0.9 else scalar(random)


_CHANGES: tuple[Callable[[Random, list[Slot]], None], ...] = (
    *(_replace, _change, _delete, _duplicate, _reorder, _borrow, _borrow, _everywhere, _everywhere, _nest, _graft),
    *(_phase, _plant),
)
_AGAIN = "@again@"
_RAW = {f"@raw{number}@": text for number, text in enumerate(("1e99999", "-0", "01", "1.", "NaN", '"\\ud800"', "+1"))}


def changed_tree(random: Random, tree: Any) -> Any:
    """The tree after one to eight changes; it is itself changed."""
    box = [tree]
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        change = random.choice(_CHANGES)
        places = slots(box)
        try:
            change(random, places if len(places) == 1 else places[1:] if random.random() < 0.98 else places)
        except (TypeError, ValueError, OverflowError, KeyError, IndexError, RecursionError):
            continue  # what earlier changes left has no such place any more
        if not box:
            box = [None]
    return box[0]


def changed_json(random: Random, data: bytes) -> bytes:
    """The text of a JSON document after changes to what it holds."""
    tree = changed_tree(random, json.loads(data))
    if random.random() < 0.15 and (places := slots(tree)):
        holder, key = random.choice(places)
        holder[key] = random.choice(list(_RAW))
    indent = 1 if random.random() < 0.2 else None
    text = json.dumps(tree, indent=indent, ensure_ascii=random.random() < 0.7, default=str, skipkeys=True)
    text = text.replace(f'"{_AGAIN}', '"')
    for mark, raw in _RAW.items():
        text = text.replace(f'"{mark}"', raw)
    if random.random() < 0.05:
        text = random.choice(("\ufeff", "\n\n", " " * 5000, "// note\n", ")]}'\n", "\t")) + text
    return text.encode("utf-8", "surrogatepass")
