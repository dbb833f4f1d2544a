"""What an editor shows of one open file: the documents of the command line, at the lines that the text has now."""

from __future__ import annotations

import ast
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lsprotocol import types as lsp

from stepscope.report.format import count, duration, printable, share, size
from stepscope.report.text import code, escape
from stepscope.trace.line_records import MovedLines, moved_lines, split_lines

SOURCE: Final = "stepscope"
OPEN_PAGE: Final = "stepscope.openPage"
WHAT_IF: Final = "stepscope.whatif"
_WARNING_SHARE: Final = 0.10
_INFORMATION_SHARE: Final = 0.03
"""Share of the step below which a finding is shown as a hint."""
_SMALLEST_SHARE: Final = 0.002
"""Of all time that a line has to cost to get a hint."""
_MOST_PLACES: Final = 20
_CHANGED: Final = "changed since"
_PHASES: Final = ("forward", "backward", "optimizer", "input", "other")
_UP: Final = re.compile(r"@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@")
_IN_LINES: Final = {"device": "Device time", "host": "Operators’ own time"}


@dataclass(frozen=True)
class Answer:
    """What the commands say of one trace: their JSON documents.

    Attributes:
        folder: in which they ran, to which the paths of diffs are relative.
    """

    trace: Path
    folder: Path
    diagnosis: Mapping[str, Any]
    lines: Mapping[str, Any]
    modules: Mapping[str, Any]

    @property
    def steps(self) -> int:
        return max(int(self.lines["steps"] or 0), 1)

    @property
    def total_ns(self) -> int:
        return max(int(self.lines["total_ns"] or 0), 1)

    @property
    def findings(self) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = self.diagnosis["findings"]
        return found

    def files(self) -> list[str]:
        """The files of the user that the lines and findings name."""
        rows = [row["file"] for row in self.lines["lines"] if row["file"]]
        return list(dict.fromkeys([*rows, *(place["file"] for each in self.findings for place in each["where"])]))


@dataclass
class LineNote:
    """What is known of one line: sums over the steps, the findings about it, and whether its text was another."""

    line: int
    recorded: list[int] = field(default_factory=list)
    costs: dict[str, Any] = field(default_factory=dict)
    findings: list[Mapping[str, Any]] = field(default_factory=list)
    is_changed: bool = False
    is_exact: bool = True


class FileNotes:
    """What is shown of a file with this text.

    Args:
        recorded: how the trace names the file.
        kept: the text that was recorded; None if it was not kept.
        units: the length of a piece of a line, as the editor counts.
        may_have_moved: whether the file has changed since, where no text was kept.
        before: notes of an earlier text, for the functions while the new text does not parse.
    """

    def __init__(
        self,
        answer: Answer,
        recorded: str,
        text: str,
        kept: str | None,
        units: Callable[[str], int] = len,
        *,
        may_have_moved: bool = False,
        before: FileNotes | None = None,
    ) -> None:
        self.answer, self.recorded, self.text = answer, recorded, text
        self.lines = split_lines(text)
        self._units = units
        self._may_have_moved = may_have_moved and kept is None
        everywhere = MovedLines({line: line for line in range(1, len(self.lines) + 1)})
        self._moved = everywhere if kept is None else moved_lines(split_lines(kept), self.lines)
        self.by_line = self._notes()
        self._parsed: ast.Module | None = None
        self._last_parsed: ast.Module | None = None if before is None else before._parsed or before._last_parsed

    def _tree(self) -> ast.Module:
        if self._parsed is None:
            try:
                self._parsed = ast.parse(self.text)
            except (SyntaxError, ValueError, RecursionError):
                return self._last_parsed or ast.Module([], [])
        return self._parsed

    def _notes(self) -> dict[int, LineNote]:
        notes: dict[int, LineNote] = {}
        for row in self.answer.lines["lines"]:
            note = self._note(notes, row["file"], row["line"])
            if note is not None:
                note.recorded.append(row["line"])
                note.is_exact = note.is_exact and row["exact_line"]
                for name, value in row.items():
                    if isinstance(value, (int, float)) and name not in ("line", "exact_line"):
                        note.costs[name] = note.costs.get(name, 0) + value
        for finding in self.answer.findings:
            for place in finding["where"][:_MOST_PLACES]:
                note = self._note(notes, place["file"], place["line"])
                if note is not None and finding not in note.findings:
                    note.recorded.append(place["line"])
                    note.findings.append(finding)
        return notes

    def _note(self, notes: dict[int, LineNote], file: str | None, line: int | None) -> LineNote | None:
        now = self._moved.now.get(line or 0) if file == self.recorded else None
        if now is None:
            return None
        note = notes.setdefault(now, LineNote(now))
        note.is_changed = self._may_have_moved or now in self._moved.changed
        return note

    def recorded_line(self, line: int) -> int | None:
        """The number that a line had when it was recorded; None if it has no note."""
        note = self.by_line.get(line)
        return note.recorded[0] if note is not None else None

    def _range(self, line: int) -> lsp.Range:
        text = self.lines[line - 1]
        begin = self._units(text[: len(text) - len(text.lstrip())])
        return lsp.Range(lsp.Position(line - 1, begin), lsp.Position(line - 1, self._units(text)))

    def diagnostics(self) -> list[lsp.Diagnostic]:
        """One for each finding at each of its lines that is still there."""
        found = []
        for line, note in sorted(self.by_line.items()):
            for finding in note.findings:
                rewritten = " (the line has changed since it was recorded)" if note.is_changed else ""
                words = (f"{finding['title']}{rewritten}.", saving_words(finding), finding["remedy"]["text"])
                found.append(
                    lsp.Diagnostic(
                        range=self._range(line),
                        message=printable(" ".join(filter(None, words))),
                        severity=_severity(finding),
                        code=finding["rule"],
                        source=SOURCE,
                        data={"rule": finding["rule"], "finding": self.answer.findings.index(finding)},
                    )
                )
        return found

    def hints(self, first: int, last: int) -> list[lsp.InlayHint]:
        """Time and share at the end of costly lines between two, from 0."""
        found = []
        for line, note in self.by_line.items():
            total = note.costs.get("total_ns", 0)
            part = total / self.answer.total_ns
            if not first <= line - 1 <= last or part < _SMALLEST_SHARE:
                continue
            words = [duration(total / self.answer.steps), share(part), *([] if note.is_exact else ["whole function"])]
            end = lsp.Position(line - 1, self._units(self.lines[line - 1]))
            label = " · ".join([*words, *([_CHANGED] if note.is_changed else [])])
            found.append(lsp.InlayHint(position=end, label=label, padding_left=True))
        return found

    def hover(self, line: int) -> lsp.Hover | None:
        """The costs of a line, from 0, its findings and their changes."""
        note = self.by_line.get(line + 1)
        if note is None:
            return None
        parts = [self._cost_table(note)] if note.costs.get("total_ns") or note.costs.get("idle_ns") else []
        parts += [_finding_words(finding) for finding in note.findings]
        if not parts:
            return None
        if note.is_changed:
            of_file = self._may_have_moved
            parts.append(
                f"*The {'file' if of_file else 'line'} has changed since it was recorded"
                f"{': lines may have moved.' if of_file else '; these are the costs of its earlier text.'}*"
            )
        return lsp.Hover(lsp.MarkupContent(lsp.MarkupKind.Markdown, "\n\n".join(parts)), self._range(line + 1))

    def _cost_table(self, note: LineNote) -> str:
        costs, steps = note.costs, self.answer.steps
        per_step = {
            name: f"{duration(costs[f'{name}_ns'] / steps)} ({share(costs[f'{name}_ns'] / self.answer.total_ns)})"
            for name in ("total", *_PHASES)
            if costs.get(f"{name}_ns")
        }
        if costs.get("idle_ns"):
            per_step["idle caused"] = duration(costs["idle_ns"] / steps)
        if costs.get("calls"):
            per_step["operators called"] = count(round(costs["calls"] / steps))
        if costs.get("bytes_allocated"):
            per_step["allocated"] = size(costs["bytes_allocated"] / steps)
        what = _IN_LINES.get(str(self.answer.lines["basis"]), "Time")
        over = f"per step, mean of {count(steps)}" if steps > 1 else "of one step"
        rows = "\n".join(f"| {name} | {value} |" for name, value in per_step.items())
        whole = "" if note.is_exact else " of the whole function: the trace does not show which of its lines"
        return f"**{what}{whole}**, {over}\n\n| | |\n|---|---|\n{rows}"

    def lenses(self, uri: str) -> list[lsp.CodeLens]:
        """Shares of the phases above functions and classes."""
        found = []
        roots = {row["module"]: row for row in self.answer.modules["modules"] if row["depth"] == 0 and row["module"]}
        lines = sorted(self.by_line)
        for node in _definitions(self._tree()):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            covered = lines[bisect_left(lines, first) : bisect_right(lines, node.end_lineno or first)]
            inside = [self.by_line[line].costs for line in covered]
            costs = {name: sum(each.get(name, 0) for each in inside) for name in (f"{name}_ns" for name in _PHASES)}
            title = self._phase_words(costs)
            if isinstance(node, ast.ClassDef) and node.name in roots:
                title = f"with its submodules {self._phase_words(roots[node.name])}"
            if title and first <= len(self.lines):
                at = lsp.Range(lsp.Position(first - 1, 0), lsp.Position(first - 1, 0))
                found.append(lsp.CodeLens(at, lsp.Command(title=title, command=OPEN_PAGE, arguments=[uri, first])))
        return found

    def _phase_words(self, costs: Mapping[str, Any]) -> str:
        parts = {name: (costs[f"{name}_ns"] or 0) / self.answer.total_ns for name in _PHASES}
        return ", ".join(f"{name} {share(part)}" for name, part in parts.items() if part >= _SMALLEST_SHARE)

    def actions(self, uri: str, first: int, last: int, file: Path) -> Iterator[lsp.CodeAction]:
        """What can be done about the findings at lines between two, from 0."""
        by_number = {(each.data or {}).get("finding"): each for each in self.diagnostics()}
        chosen = [note for line, note in sorted(self.by_line.items()) if first <= line - 1 <= last]
        findings = [finding for note in chosen for finding in note.findings]
        for finding in {id(each): each for each in findings}.values():
            number = self.answer.findings.index(finding)
            about = [by_number[number]] if number in by_number else []
            diff = finding["remedy"]["diff"]
            if diff:
                edits = edits_of(diff, self.text, self._units, _name_in_diff(file, self.answer.folder))
                yield lsp.CodeAction(
                    f"Apply the change of {finding['rule']}: {finding['remedy']['text']}",
                    kind=lsp.CodeActionKind.QuickFix,
                    diagnostics=about,
                    edit=None if edits is None else lsp.WorkspaceEdit(changes={uri: edits}),
                    disabled=None
                    if edits is not None
                    else lsp.CodeActionDisabled(
                        "the text has changed since: diagnose anew, or make the change by hand"
                    ),
                )
            title = f"What if {finding['rule']} were fixed?"
            command = lsp.Command(title=title, command=WHAT_IF, arguments=[uri, finding["rule"]])
            yield lsp.CodeAction(title, kind=lsp.CodeActionKind.Empty, diagnostics=about, command=command)
        if chosen:
            title = "Open the page at this line"
            command = lsp.Command(title=title, command=OPEN_PAGE, arguments=[uri, chosen[0].line])
            yield lsp.CodeAction(title, kind=lsp.CodeActionKind.Empty, command=command)


def saving_words(finding: Mapping[str, Any]) -> str:
    """What a finding saves, and how that was obtained."""
    saved = finding["saving_ns_per_step"]
    if not saved:
        return ""
    return f"Saves {duration(saved)} per step ({share(finding['saving_share'])}): {finding['saving_basis']}."


def _finding_words(finding: Mapping[str, Any]) -> str:
    remedy = finding["remedy"]
    parts = [f"**{escape(finding['title'])}**", escape(saving_words(finding)), escape(remedy["text"])]
    if remedy["code"]:
        fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", remedy["code"]))])
        parts.append(f"{fence}python\n{remedy['code']}\n{fence}")
    parts.append(f"{code('stepscope explain ' + finding['rule'])} says how it is measured.")
    return "\n\n".join(filter(None, parts))


def _severity(finding: Mapping[str, Any]) -> lsp.DiagnosticSeverity:
    saved = finding["saving_share"]
    if saved >= _WARNING_SHARE:
        return lsp.DiagnosticSeverity.Warning
    return lsp.DiagnosticSeverity.Information if saved >= _INFORMATION_SHARE else lsp.DiagnosticSeverity.Hint


def _definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node


def _name_in_diff(file: Path, folder: Path) -> str:
    real, folder = Path(os.path.realpath(file)), Path(os.path.realpath(folder))
    return real.relative_to(folder).as_posix() if real.is_relative_to(folder) else real.as_posix().lstrip("/")


def edits_of(
    diff: str, text: str, units: Callable[[str], int] = len, name: str | None = None
) -> list[lsp.TextEdit] | None:
    """The edits by which a unified diff changes a text; None if it does not apply.

    A hunk whose lines stand at one other place only applies there.

    Args:
        name: the file's name in the diff, if that may be of several files.
    """
    lines = split_lines(text)
    lines += [""] if text.endswith(("\n", "\r")) else []  # as editors count
    edits: list[lsp.TextEdit] = []
    begin = 0
    for wanted, old, new in _hunks(diff, name):
        at = _place_of(old, lines, wanted, begin)
        if at is None:
            return None
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        rest, other = old[same:], new[same:]
        while rest and other and rest[-1] == other[-1]:
            rest, other = rest[:-1], other[:-1]
        edits.append(_edit(lines, at + same, len(rest), other, units))
        begin = at + len(old)
    return edits or None


def _edit(lines: Sequence[str], first: int, removed: int, added: Sequence[str], units: Callable[[str], int]) -> Any:
    """Replace whole lines; at the end of a text there may be no line to begin the next one."""
    if first + removed < len(lines):
        place = lsp.Range(lsp.Position(first, 0), lsp.Position(first + removed, 0))
        return lsp.TextEdit(place, "".join(f"{line}\n" for line in added))
    last = units(lines[-1]) if lines else 0
    if first == 0:
        return lsp.TextEdit(lsp.Range(lsp.Position(0, 0), lsp.Position(max(len(lines) - 1, 0), last)), "\n".join(added))
    begin = lsp.Position(first - 1, units(lines[first - 1]))
    place = lsp.Range(begin, lsp.Position(len(lines) - 1, last))
    return lsp.TextEdit(place, "".join(f"\n{line}" for line in added))


def _hunks(diff: str, name: str | None) -> list[tuple[int, list[str], list[str]]]:
    """(index of the first line, lines before, lines after) of each hunk of one file."""
    found: list[tuple[int, list[str], list[str]]] = []
    is_meant = name is None
    left = [0, 0]
    old: list[str] = []
    new: list[str] = []
    for line in diff.split("\n"):
        if not any(left) and line.startswith("+++ "):
            is_meant = name is None or line[4:].partition("\t")[0].removeprefix("b/") == name
        elif not any(left) and _UP.match(line):
            numbers = [[int(each) for each in part[1:].split(",")] for part in line.split()[1:3]]
            left = [part[1] if len(part) > 1 else 1 for part in numbers]
            old, new = [], []
            if is_meant:
                found.append((max(numbers[0][0] - (1 if left[0] else 0), 0), old, new))
        elif any(left) and line[:1] in (" ", "-", "+", ""):
            kind, text = line[:1] or " ", line[1:]
            if kind in " -":
                left[0] -= 1
                old.append(text.rstrip("\r"))
            if kind in " +":
                left[1] -= 1
                new.append(text.rstrip("\r"))
    return found


def _place_of(old: Sequence[str], lines: Sequence[str], wanted: int, begin: int) -> int | None:
    """Where lines stand in a text: where they are wanted, or at the only other place from `begin` on."""
    if wanted >= begin and list(lines[wanted : wanted + len(old)]) == list(old):
        return wanted
    if not old:
        return None
    places = [
        at
        for at in range(begin, len(lines) - len(old) + 1)
        if lines[at] == old[0] and list(lines[at : at + len(old)]) == list(old)
    ]
    return places[0] if len(places) == 1 else None
