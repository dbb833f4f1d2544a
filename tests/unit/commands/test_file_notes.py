"""What an editor shows of a file, from documents written by hand."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pygls", reason="the extra editor is not installed")

from lsprotocol import types as lsp
from pygls.protocol import default_converter

from stepscope.commands.assist.file_notes import Answer, FileNotes, edits_of
from tests.work_done import counting

FILE = "/job/train.py"
PHASES = ("forward", "backward", "optimizer", "input", "other")


def row(line: int, **costs: Any) -> dict[str, Any]:
    known = {f"{name}_ns": costs.pop(name, 0) for name in PHASES}
    return {"file": FILE, "line": line, "exact_line": True, **known, "total_ns": sum(known.values()), **costs}


def finding(line: int, share: float = 0.2, diff: str = "", title: str = "a loop") -> dict[str, Any]:
    return {
        "rule": "loop-in-step",
        "title": title,
        "saving_ns_per_step": int(share * 1e6),
        "saving_share": share,
        "saving_basis": "counted",
        "where": [{"file": FILE, "line": line}],
        "remedy": {"text": "Compute it at once.", "code": "", "diff": diff},
    }


def answer(rows: list[dict[str, Any]], *findings: dict[str, Any], modules: Any = (), steps: int = 2) -> Answer:
    total = sum(each["total_ns"] for each in rows)
    lines = {"lines": rows, "steps": steps, "total_ns": total, "basis": "device"}
    return Answer(Path("/t"), Path("/job"), {"findings": list(findings)}, lines, {"modules": list(modules)})


def notes(text: str, *given: Any, kept: str | None = None, **more: Any) -> FileNotes:
    return FileNotes(answer(*given), FILE, text, kept, **more)


def test_without_anything_about_the_file_there_is_nothing() -> None:
    found = notes("x = 1\n", [{**row(1, forward=10), "file": "/other.py"}, {**row(1), "file": None, "line": None}])

    assert not any((found.diagnostics(), found.hints(0, 10), found.lenses("u"), found.hover(0)))
    assert list(found.actions("u", 0, 9, Path(FILE))) == []


def test_lines_of_one_number_are_added_and_means_are_per_step() -> None:
    found = notes("x = [f(y) for y in z]\n", [row(1, forward=1_000_000), row(1, backward=3_000_000, idle_ns=None)])

    assert [each.label for each in found.hints(0, 0)] == ["2.0 ms · 100.0 %"]
    hover = found.hover(0)
    assert hover is not None
    assert "| forward | 500.0 us (25.0 %) |" in hover.contents.value  # type: ignore[union-attr]
    assert "idle" not in hover.contents.value  # type: ignore[union-attr]


@pytest.mark.parametrize(("share", "severity"), [(0.5, "Warning"), (0.05, "Information"), (0.01, "Hint")])
def test_the_more_a_finding_saves_the_louder_it_is(share: float, severity: str) -> None:
    (found,) = notes("x = 1\n", [], finding(1, share)).diagnostics()

    assert found.severity == lsp.DiagnosticSeverity[severity]
    assert found.code == "loop-in-step"


def test_lines_that_are_gone_have_no_notes_and_rewritten_ones_say_so() -> None:
    rows = [row(line, forward=10**6) for line in (1, 2, 3)]
    kept = "first = encode(batch)\nsecond = decode(first)\nloss = criterion(second)\n"
    now = "import torch\nfirst = encode(batch)\nloss = criterion(second, targets)\n"

    found = notes(now, rows, finding(2), finding(3), kept=kept)

    assert {each.position.line: str(each.label).endswith("changed since") for each in found.hints(0, 9)} == {
        1: False,
        2: True,
    }
    assert [each.range.start.line for each in found.diagnostics()] == [2]
    assert found.recorded_line(3) == 3


def test_names_of_a_trace_cannot_format_the_hover() -> None:
    found = notes("x = 1\n", [], finding(1, title="<img src=x> [click](command:evil) `x`")).hover(0)

    assert found is not None
    assert "<img" not in found.contents.value  # type: ignore[union-attr]
    assert "[click](" not in found.contents.value  # type: ignore[union-attr]


def test_functions_and_classes_have_a_lens_also_while_the_text_does_not_parse() -> None:
    text = "class Net:\n    @cached\n    def forward(self, x):\n        return x @ x\n\ndef idle():\n    pass\n"
    module = {"module": "Net", "depth": 0, **{f"{name}_ns": 0 for name in PHASES}, "forward_ns": 3}
    given = ([row(4, forward=1, backward=3)],)
    first = FileNotes(answer(*given, modules=[module]), FILE, text, text)

    shown = first.lenses("u")
    broken = FileNotes(first.answer, FILE, text + "def (", text, before=first).lenses("u")

    for found in (shown, broken):
        lenses = {each.range.start.line: each.command.title for each in found if each.command}
        assert lenses == {0: "with its submodules forward 75.0 %", 1: "forward 25.0 %, backward 75.0 %"}


def applied(edits: list[lsp.TextEdit], text: str) -> str:
    """The text with edits of whole lines and ends of lines."""
    lines = text.split("\n")
    for edit in sorted(edits, key=lambda each: -each.range.start.line):
        first, last = edit.range.start, edit.range.end
        end = lines[last.line][last.character :] if last.line < len(lines) else ""
        new = lines[first.line][: first.character] + edit.new_text + end
        lines[first.line : last.line + 1] = new.split("\n")
    return "\n".join(lines)


TEXTS = st.lists(st.sampled_from(["a", "b", "  c"]), min_size=1, max_size=12).map("x\n".join)


@given(TEXTS, TEXTS, st.booleans())
def test_the_edits_of_a_diff_make_its_text(before: str, after: str, is_ended: bool) -> None:
    end = "\n" if is_ended else ""
    before, after = (text.rstrip("\n") for text in (before, after))
    lines = [before.split("\n"), after.split("\n")]
    before, after = before + end, after + end
    diff = "\n".join(difflib.unified_diff(lines[0], lines[1], "a/train.py", "b/train.py", lineterm=""))

    edits = edits_of(diff, before, name="train.py")

    assert (edits is None) == (lines[0] == lines[1])
    assert applied(edits or [], before) == after
    assert edits_of(diff, before, name="other.py") is None


def test_a_diff_applies_where_its_lines_moved_to_and_nowhere_else() -> None:
    diff = "--- a/train.py\n+++ b/train.py\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n"

    (edit,) = edits_of(diff, "new\none\ntwo\nthree\n") or []

    assert (edit.range.start.line, edit.new_text) == (2, "2\n")
    assert edits_of(diff, "one\ntwo \nthree\n") is None
    assert edits_of(diff, "x\none\ntwo\nthree\none\ntwo\nthree\n") is None


def test_a_refused_change_says_why() -> None:
    diff = "--- a/train.py\n+++ b/train.py\n@@ -1,1 +1,1 @@\n-x = 1\n+x = 2\n"
    found = [notes(text, [], finding(1, diff=diff)).actions("u", 0, 0, Path(FILE)) for text in ("x = 1\n", "x = 3\n")]

    good, bad = (next(iter(each)) for each in found)

    assert (good.edit is None, good.disabled is None) == (False, True)
    assert (bad.edit is None, bad.disabled is None) == (True, False)


def test_a_thousand_hints_of_a_long_file_take_little_work() -> None:
    text = "".join(f"value_{line} = layer_{line % 7}(value_{line - 1})\n" for line in range(10_000))
    rows = [row(10 * number + 1, forward=10**6) for number in range(1_000)]
    rows = [{**each, "total_ns": 10**9} for each in rows]
    found = FileNotes(Answer(Path("/t"), Path("/job"), {"findings": []}, {**answer(rows).lines, "total_ns": 10**10},
                             {"modules": []}), FILE, "# new\n" + text, text)  # fmt: skip
    make: Callable[[], Any] = default_converter
    converter = make()
    converter.unstructure(found.hints(0, 1))  # makes its functions at the first use

    with counting() as work:
        hints = found.hints(0, 10_000)
        sent = json.dumps(converter.unstructure(hints))

    print(work.total)
    assert work.total < 200_000
    assert len(hints) == 1_000
    assert sent.count("ms") == 1_000
