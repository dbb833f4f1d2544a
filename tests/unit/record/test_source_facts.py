"""Facts from the user's source: loops, bindings, and metrics computed on the host."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from stepscope.record.source_facts import (
    bindings_of_source,
    loops_of_source,
    metrics_of_source,
    operations_of_source,
    source_facts,
    with_readers,
)
from stepscope.trace.program_facts import ListFacts

CARRYING = {
    "decoding": ("for i in range(n):\n    tokens = torch.cat([tokens, model(tokens)], 1)", ("tokens",)),
    "a state": ("for x in xs:\n    h = cell(x, h)\n    out.append(h)", ("h",)),
    "a cache": ("for i in range(n):\n    out = model(x, past)\n    past = out.past", ("past",)),
    "an attribute": ("for x in xs:\n    self.h = self.cell(x, self.h)", ("self.h",)),
    "items": ("for t in range(n):\n    h[t + 1] = cell(x[t], h[t])", ("h",)),
    "a growing list": ("while len(seq) < n:\n    seq.append(model(seq))", ("seq",)),
    "an object's state": ("for t in range(n):\n    world.advance(model(world.state))", ("world.state",)),
    "all items": ("for i, x in enumerate(xs):\n    h[i] = f(x, h)", ("h",)),
    "in a condition": ("for i in range(n):\n    if i:\n        x = f(x)", ("x",)),
}
INDEPENDENT = {
    "a sum": "for x in xs:\n    loss = loss + f(x)",
    "an augmented sum": "for x in xs:\n    loss += f(x)",
    "a list": "for x in xs:\n    out.append(f(x))",
    "a collected tensor": "for x in xs:\n    out = torch.cat([out, f(x)])",
    "bound anew": "for x in xs:\n    y = f(x)\n    z = g(y)",
    "its own target": "for x in xs:\n    x = f(x)",
    "a comprehension": "for x in xs:\n    y = [g(z) for z in x]",
    "items of their own": "for i in range(n):\n    out[i] = f(x[i])",
    "an item used and set": "for i, env in enumerate(envs):\n    a = f(s[i])\n    s[i], r = env.step(a)",
    "an object that is only called": "for x in xs:\n    log.info(f(x))\n    log.flush()",
    "an item changed": "for i in range(n):\n    out[i] = out[i] * 2",
}


@pytest.mark.parametrize("name", CARRYING)
def test_what_a_repetition_needs_of_the_one_before_is_named(name: str) -> None:
    text, names = CARRYING[name]

    [loop] = loops_of_source(text, "train.py")

    assert loop.carried == names
    assert (loop.file, loop.line, loop.first) == ("train.py", 1, 2)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_repetitions_that_only_collect_are_independent(name: str) -> None:
    [loop] = [each for each in loops_of_source(INDEPENDENT[name], "train.py") if not each.is_comprehension]
    assert loop.carried == ()


def test_a_comprehension_is_an_independent_loop() -> None:
    [loop] = loops_of_source("total = sum(f(x)\n            for x in xs)", "train.py")
    assert (loop.line, loop.first, loop.last, loop.carried, loop.is_comprehension) == (1, 1, 1, (), True)


def test_files_that_are_no_python_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(dedent("while go:\n    x = f(x)\n"))
    (tmp_path / "b.py").write_text("for in in in:")
    (tmp_path / "c.py").write_bytes(b"\xff\x00")
    files = [str(tmp_path / name) for name in ("a.py", "b.py", "c.py", "none.py")]

    assert [loop.carried for loop in source_facts([*files, "<stdin>"])[0]] == [("x",)]


def test_bindings_name_their_function_and_what_only_changes_a_name() -> None:
    text = dedent("""\
        @decorated
        def forward(x):
            table = zeros(
                9)
            table[:, 0] = sin(x)
            y = table; z = y
            return table
        kept = forward(1)
    """)

    found = [(each.function, each.name, each.first, each.last, each.is_change) for each in bindings_of_source(text, "")]

    assert found == [(0, "kept", 8, 8, False), (1, "table", 3, 4, False), (1, "table", 5, 5, True)]


def test_statements_that_read_a_growing_list_for_more_than_to_add_to_it(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    text = """\
        def add(self, x):
            self.items.append(x)
            self.items += [x]
            for each in self.items:
                total = each
            mean = sum(
                self.items)
    """
    file.write_text(dedent(text))
    grown = ListFacts(file=str(file), function=1, name="self.items", length=9, growth=2)
    same = ListFacts(file=str(file), function=1, name="self.items", length=9)

    assert [each.read for each in with_readers((grown, same))] == [((4, 5), (6, 7)), ()]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("y = 0.5 * x * (1 + torch.tanh(x))", ["add", "mul", "mul", "tanh"]),
        ("y += -x", ["add", "neg"]),
        ("y[mask] = a < b < c", ["lt", "lt"]),
        ("o = optim.AdamW(p, fused=True, foreach=False)", ["AdamW", "foreach=", "fused=True"]),
        ("policy = Categorical(logits=model(x))", ["Categorical", "logits=", "model"]),
        (
            "policy = torch.distributions.Categorical(logits=model(x)).sample()",
            ["Categorical", "logits=", "model", "sample"],
        ),
    ],
)
def test_operations_that_a_statement_makes_itself(source: str, names: list[str]) -> None:
    before, mine, after = operations_of_source(f"import torch\n{source}\n", "model.py").names

    assert (before, sorted(mine.split()), after) == ("", names, "")


def test_a_statement_of_several_lines_counts_at_each_and_not_what_is_inside_it() -> None:
    text = "if a + b:\n    y = (\n        a\n        * b\n    )\n"

    assert operations_of_source(text, "model.py").names == ("add", "mul", "mul", "mul", "", "")


METRIC = """\
def confusion(prediction, target):
    matrix = zeros((9, 9))
    for p, t in zip(prediction, target):
        matrix[t, p] += 1
    return matrix

def train():
    for x, y in loader:
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        found = out.argmax(1).cpu().numpy()
        total = total + confusion(found, y)
        score = f1(total)
"""
SILENT = {
    "an action": "for x in xs:\n    a = policy(x).numpy()\n    s = env.step(a)\n    state = torch.from_numpy(s)",
    "a token": "while go:\n    n = logits.argmax(-1).item()\n    ids.append(n)\n    out = model(torch.tensor([ids]))",
    "tensors only": "for x in xs:\n    right += (model(x).argmax(1) == y).sum()",
}


def test_statements_and_the_functions_that_they_call() -> None:
    found = {(each.function, each.first, each.last) for each in metrics_of_source(METRIC, "train.py")}

    assert found == {("train", 12, 12), ("train", 13, 13), ("train", 14, 14), ("confusion", 1, 5)}


def test_values_that_are_read_one_by_one() -> None:
    text = "def update(self, a, b):\n    for p, t in zip(a, b):\n        self.v.append(p.item())\n"

    assert [(each.first, each.last) for each in metrics_of_source(text, "train.py")] == [(2, 2), (3, 3)]


@pytest.mark.parametrize("name", SILENT)
def test_values_of_which_a_tensor_is_made_again_are_no_metric(name: str) -> None:
    assert metrics_of_source(dedent(SILENT[name]), "train.py") == []
