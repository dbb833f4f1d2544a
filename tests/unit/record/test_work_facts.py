"""What functions do, as their source tells."""

from __future__ import annotations

from textwrap import dedent, indent

import pytest

from stepscope.record.work_facts import work_of_source

PER_SAMPLE = """
class Texts(Dataset):
    def __init__(self):
        self.words = sorted(read())
        self.table = make()
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
{body}
"""
FIRST = 12
"""Line of the body."""
KINDS = {
    "a table": ("table = build(self.words)\nreturn table[index]", [("constant", "table", 0)]),
    "of the whole set": ("mean = self.table.mean(0)\nreturn self.table[index] - mean", [("constant", "mean", 0)]),
    "filled in a loop": (
        "t = {}\nfor w in self.words:\n    t[w] = len(t)\nreturn t[index]",
        [("constant", "t", 0), ("constant", "t", 2), ("loop", "", 1)],
    ),
    "filled by the sample": ("t = {}\nfor w in index:\n    t[w] = 1\nreturn t", [("loop", "", 1)]),
    "drawn": ("noise = np.random.normal(size=9)\nreturn noise", []),
    "of an attribute that changes": ("x = f(self.epoch)\nreturn x", []),
    "through a variable": ("n = index + 1\nx = f(n)\nreturn x", []),
    "under a condition": ("if index > 3:\n    x = f(1)\nelse:\n    x = f(2)\nreturn x", []),
    "an iterator": ("x = next(self.table)\nreturn x", []),
    "a lookup": ("i = self.words.index(index)\nreturn i", [("lookup", "self.words", 0)]),
    "a test": ("if index in self.words:\n    return 1", [("lookup", "self.words", 0)]),
    "perhaps a list": ("return index in self.table", [("maybe_lookup", "self.table", 0)]),
    "a row": ("row = self.table.iloc[index]\nreturn f(row)", [("row", "self.table", 0), ("row", "self.table", 1)]),
    "a growing slice": (
        "return [sum(index[:t]) for t in range(9)]",
        [("growing", "index", 0), ("loop", "", 0)],
    ),
    "sums over growing ranges": (
        "for t in range(9):\n    for k in range(t, 9):\n        total += 0.9 ** (k - t) * index[k]",
        [("growing", "index", 1), ("loop", "", 0), ("loop", "", 1)],
    ),
    "pairs": (
        "for t in range(9):\n    for k in range(t):\n        d += index[t] - index[k]",
        [("loop", "", 0), ("loop", "", 1)],
    ),
    "a conversion": ("return torch.tensor(self.rows[index:index + 9])", [("converted", "self.rows", 0)]),
    "a conversion of what a call gives": ("return torch.tensor(load(index))", []),
    "a mask": ("return self.table.store == index", [("masked", "self.table", 0)]),
    "a mask by an item": ("return 1 <= self.table['store']", [("masked", "self.table", 0)]),
    "what a mask chooses": (
        "chosen = self.day < index\nreturn self.values[chosen]", [("masked", "self.day", 0), ("masked", "self.day", 1)]
    ),
    "names that are compared": ("return index == 4 or index.start is None", []),
    "a draw without replacement": ("return np.random.choice(index, 9, replace=False)", [("shuffled", "", 0)]),
    "a draw without order": ("return rng.choice(index, 9, replace=False, shuffle=False)", []),
    "a draw by probabilities": ("return np.random.choice(9, p=self.chances)", [("weighted", "self.chances", 0)]),
    "an array joined with a part in a loop": (
        "for x in index:\n    out = np.concatenate([out, x])\nreturn np.append(out, 0)",
        [("loop", "", 0), ("appended", "out", 1)],
    ),
    "parts that are joined once": ("out = torch.cat([self.rows, index])\nreturn out", []),
    "a draw with replacement": ("return random.choice(index)", []),
    "a window": ("return [sum(index[t:t + 3]) for t in range(9)]", [("loop", "", 0)]),
    "a stream": ("for x in f(index):\n    yield x", []),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_the_kinds_of_work(name: str) -> None:
    body, expected = KINDS[name]
    text = PER_SAMPLE.format(body=indent(body, " " * 8))

    functions, works = work_of_source(text, "data.py")

    getitem = next(each for each in functions if each.name == "Texts.__getitem__")
    mine = [each for each in works if each.function == getitem.line]
    found = [
        (each.kind, each.name, each.first - FIRST) for each in mine if each.name or each.kind in ("loop", "shuffled")
    ]
    assert sorted(set(found)) == sorted(expected)


def test_what_another_class_keeps_is_no_constant() -> None:
    text = dedent("""\
        class Urgent(Scheduler):
            weights = load()
            def schedule(self, budget):
                waiting = list(self.queue)
                weights = scaled(self.weights)
                return waiting, weights
        """)

    works = work_of_source(text, "serve.py")[1]

    assert [each.name for each in works if each.kind == "constant"] == ["weights"]


def test_functions_say_what_they_call_and_whether_they_draw_numbers() -> None:
    text = dedent("""\
        def clean(text):
            return text.lower()
        class Texts:
            def encode(self, text):
                return [ord(letter) for letter in clean(text)]
            def cut(self, text):
                return text[random.randrange(9):]
        """)

    clean, encode, cut = work_of_source(text, "data.py")[0]

    assert (clean.name, clean.line, clean.last) == ("clean", 1, 2)
    assert "clean" in encode.calls
    assert [each.changes_by_itself for each in (clean, encode, cut)] == [False, False, True]
