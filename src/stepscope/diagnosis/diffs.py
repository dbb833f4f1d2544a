"""Turn the remedies of findings into diffs of the user's own files.

File names in a trace are not trusted: this module reads no files, and a source text is used only if the function and
line of a finding are in it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from stepscope.diagnosis.diagnosis import Diagnosis
from stepscope.diagnosis.finding import Finding, Location, Remedy
from stepscope.remedies.rewrites import REWRITES, Kind, Rewrite, rewrites_of, unified_diff

MOST_REWRITES: Final = 20
"""Maximum number of rewrites for one finding: nobody reads a longer diff."""
_SETTINGS: Final[Mapping[str, tuple[str, str]]] = {
    "workers": ("num_workers", ""),
    "prefetch": ("prefetch_factor", ""),
    "pin-memory": ("pin_memory", "True"),
    "persistent-workers": ("persistent_workers", "True"),
    "bucket-mb": ("bucket_cap_mb", ""),
    "gradient-view": ("gradient_as_bucket_view", "True"),
    "static-graph": ("static_graph", "True"),
    "no-find-unused": ("find_unused_parameters", "False"),
}
"""Flag of a remedy -> the keyword that it sets, and the value if the flag has none."""
_NO_FUNCTION: Final = ("", "<module>")


@dataclass(frozen=True, slots=True)
class UserSource:
    """A source file of the user.

    Attributes:
        path: name for diffs, with / between folders.
        inside: whether `path` is relative to the folder where a patch will be applied.
    """

    path: str
    text: str
    encoding: str = "utf-8"
    inside: bool = True


class Diffs:
    """Fills in the diffs of diagnoses and collects their changes for one patch.

    Args:
        read: returns the source of a file named in a trace; None if there is no file that may be read.
    """

    def __init__(self, read: Callable[[str], UserSource | None]) -> None:
        self._read = read
        self._found: dict[tuple[str, tuple[tuple[str, str], ...]], list[Rewrite]] = {}
        self._changed: dict[str, tuple[UserSource, dict[Rewrite, None]]] = {}

    def filled(self, diagnosis: Diagnosis) -> Diagnosis:
        """The diagnosis with a diff for each finding whose remedy rewrites readable source."""
        files = list(dict.fromkeys(place.file for finding in diagnosis.findings for place in finding.where))
        return replace(diagnosis, findings=tuple(self._filled(finding, files) for finding in diagnosis.findings))

    def patch(self) -> bytes:
        """All changes as one patch for `git apply` or `patch -p1`; b"" if there are none.

        The part of each file is in that file's encoding.
        """
        return b"".join(
            _encoded(source, list(rewrites)) for source, rewrites in self._changed.values() if source.inside
        )

    def outside(self) -> list[str]:
        """Files that a patch cannot name because they are outside the folder where it is applied."""
        return [source.path for source, _ in self._changed.values() if not source.inside]

    def _filled(self, finding: Finding, files: Iterable[str]) -> Finding:
        chosen: dict[str, tuple[UserSource, list[Rewrite]]] = {}
        kinds = list(_kinds(finding))
        for source, rewrite in self._rewrites(finding, kinds, files) if kinds else ():
            _, rewrites = chosen.setdefault(source.path, (source, []))
            if rewrite not in rewrites and len(rewrites) < MOST_REWRITES:
                rewrites.append(rewrite)
                _, kept = self._changed.setdefault(source.path, (source, {}))
                kept[rewrite] = None
        diff = "".join(unified_diff(source.path, source.text, rewrites) for source, rewrites in chosen.values())
        return replace(finding, remedy=replace(finding.remedy, diff=diff)) if diff else finding

    def _rewrites(
        self, finding: Finding, kinds: Iterable[Kind], files: Iterable[str]
    ) -> Iterator[tuple[UserSource, Rewrite]]:
        settings = settings_of(finding.remedy)
        for kind in kinds:
            places: list[tuple[str, Location | None]] = [(place.file, place) for place in finding.where]
            if kind.anywhere:
                places = [(file, None) for file in dict.fromkeys([*(file for file, _ in places), *files])]
            for file, place in places:
                source = self._read(file)
                found = self._of_file(source, settings) if source is not None else []
                found = [each for each in found if each.name == kind.name and (place is None or is_at(place, each))]
                if source is not None and found and _is_defined_at(source.text, place):
                    yield from ((source, rewrite) for rewrite in found)
                    if kind.anywhere:
                        break

    def _of_file(self, source: UserSource, settings: Mapping[str, str]) -> list[Rewrite]:
        """All rewrites of a file; empty if it is not valid Python."""
        key = source.path, tuple(sorted(settings.items()))
        if key not in self._found:
            try:
                self._found[key] = rewrites_of(source.text, settings=settings)
            except ValueError:
                self._found[key] = []
        return self._found[key]


def settings_of(remedy: Remedy) -> dict[str, str]:
    """Constructor keywords that the remedy's flags set, with their values as source text."""
    found = {}
    for word in remedy.apply:
        name, _, value = word.partition("=")
        keyword, default = _SETTINGS.get(name, ("", ""))
        if keyword and (value.isdecimal() or default):
            found[keyword] = value or default
    return found


def is_at(place: Location, rewrite: Rewrite) -> bool:
    """Whether a rewrite changes the statement that a finding names (for an inexact place, the function)."""
    name = place.function.rpartition(".")[2]
    in_function = name == rewrite.function.rpartition(".")[2] or (name in _NO_FUNCTION and not rewrite.function)
    inner = name.startswith("<")  # a comprehension or lambda, whose enclosing function is not recorded
    if place.exact_line:
        return (in_function or inner) and rewrite.line <= place.line <= rewrite.last_line
    return in_function


def _kinds(finding: Finding) -> Iterator[Kind]:
    flags = {word.partition("=")[0] for word in finding.remedy.apply}
    for kind in REWRITES:
        if finding.rule in kind.rules or kind.name in flags:
            yield kind


def _is_defined_at(text: str, place: Location | None) -> bool:
    """Whether the text defines the finding's function around its line."""
    if place is None or place.function in _NO_FUNCTION or place.function.startswith("<"):
        return True
    name = place.function.rpartition(".")[2]
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name == name
        and min([node.lineno, *(each.lineno for each in node.decorator_list)]) <= place.line <= (node.end_lineno or 0)
        for node in ast.walk(ast.parse(text.removeprefix("\ufeff")))
    )


def _encoded(source: UserSource, rewrites: list[Rewrite]) -> bytes:
    """The diff with its lines in the file's encoding and the file names in UTF-8."""
    lines = unified_diff(source.path, source.text, rewrites).split("\n")
    head, body = lines[:2], lines[2:]
    return "\n".join([*head, ""]).encode("utf-8", "backslashreplace") + "\n".join(body).encode(source.encoding)
