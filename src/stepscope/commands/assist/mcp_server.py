"""The commands as tools of a coding assistant, by the Model Context Protocol.

Each tool runs a command of stepscope in a process of its own: answers are those of the command line, and neither a huge
trace nor a bug ends the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field

from stepscope import __version__
from stepscope.commands.assist.process import STEPSCOPE, Ended, run
from stepscope.commands.read.costs import MEMORY
from stepscope.commands.read.tables import IDLE, KERNELS, OPERATORS, STEPS
from stepscope.commands.shared.options import Command
from stepscope.commands.shared.reading import SOURCES_VARIABLE, trace_paths
from stepscope.commands.view.choices import CHOICES
from stepscope.errors import StepscopeError
from stepscope.record.runs import run_named
from stepscope.report.brief import TOKENS, as_data, fitted

_LATEST: Final = "latest"
_RULE: Final = r"^[a-z][a-z-]{1,60}$"
_RULE_OR_NONE: Final = r"^([a-z][a-z-]{1,60})?$"
_TABLES: Final = (STEPS, IDLE, OPERATORS, KERNELS, MEMORY)
_MOST_SAID: Final = 2000
"""Characters of what a program that failed printed last."""
_INSTRUCTIONS: Final = (
    "stepscope explains why training and inference steps are slow, from recorded traces. Begin with diagnose: its "
    "findings are ordered by the time that each would save, and name the lines and the change. Change one thing, "
    "record again, and let compare (or bench) say whether it is faster: no change is proven without that. Times are of "
    "a step unless another unit is named."
)


@dataclass(frozen=True)
class Access:
    """What an assistant may use, as the user said at start.

    Attributes:
        folders: where traces and sources are read, with the runs that stepscope keeps; commands run in the first.
        programs: command lines that may be recorded.
        writes: whether diffs may be applied.
        seconds: that a command may take.
        record_seconds: that a recorded program may take.
    """

    folders: tuple[Path, ...]
    programs: tuple[str, ...] = ()
    writes: bool = False
    seconds: float = 300.0
    record_seconds: float = 1800.0

    def path(self, name: str) -> Path:
        """The absolute path of a file or folder that may be read.

        Raises:
            ToolError: it is elsewhere.
        """
        try:
            place = Path(os.path.realpath(self.folders[0] / name))
        except ValueError as error:
            raise ToolError("that is no path") from error
        if not any(place.is_relative_to(folder) for folder in self.folders):
            allowed = ", ".join(map(str, self.folders))
            raise ToolError(f"{name} is not below {allowed}: start stepscope mcp with --folder to allow another folder")
        return place

    def trace(self, name: str) -> str:
        """How a trace or run is named on the command line.

        Raises:
            ToolError: there is none, or it may not be read.
        """
        name = name or _LATEST
        try:
            is_file = (self.folders[0] / name).exists()
            run = None if os.sep in name or (is_file and name != _LATEST) else run_named(name)
            if run is not None:
                return str(run.path)
            if name == _LATEST and not is_file:  # the command says that there is none
                return name
            place = self.path(name)
            if place.is_dir():
                for file in trace_paths(str(place)):  # a link may lead elsewhere
                    self.path(str(file))
        except StepscopeError as error:
            raise ToolError(str(error)) from error
        except ValueError as error:
            raise ToolError("that names no trace") from error
        return str(place)

    def about(self, trace: str) -> str:
        """Which trace an answer is about, where the latest run was taken."""
        run = run_named(_LATEST) if trace in ("", _LATEST) else None
        return f"About the latest run, {run.name}." if run is not None else f"About {trace}."

    def allow(self, program: str) -> None:
        """Raise `ToolError` unless the program may be run."""
        if program not in self.programs:
            known = "; ".join(self.programs)
            known = f"allowed are: {known}" if known else "none is: start stepscope mcp with --allow"
            raise ToolError(f"this program is not allowed; {known}")


async def _run(command: Sequence[str], access: Access, seconds: float) -> Ended:
    """Run a command in the first folder.

    Raises:
        ToolError: it took too long.
    """
    sources = os.pathsep.join(map(str, access.folders))
    try:
        return await run(command, access.folders[0], seconds, {SOURCES_VARIABLE: sources})
    except asyncio.TimeoutError as error:
        raise ToolError(f"this took longer than {seconds:g} s and was ended") from error


Trace = Annotated[
    str, Field(description="path of a trace or a folder of ranks, or a run's name; empty: the latest run")
]
Tokens = Annotated[int, Field(description="most tokens of the answer, about", ge=200, le=50_000)]
_READS: Final = ToolAnnotations(read_only_hint=True, open_world_hint=False)


class Tools:
    """What an assistant can ask and have done."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def diagnose(self, trace: Trace = "", tokens: Tokens = TOKENS) -> str:
        """Why the steps are slow: where the time goes, why the device is idle, and what to change, best first."""
        place = self._access.trace(trace)
        text = await self._answer("diagnose", place, "--for-assistant", f"--tokens={tokens}")
        return f"{self._access.about(trace)}\n{text}"

    async def findings(
        self,
        trace: Trace = "",
        rule: Annotated[str, Field(description="only this rule's", pattern=_RULE_OR_NONE)] = "",
        top: Annotated[int, Field(description="how many, the largest saving first", ge=1, le=50)] = 3,
    ) -> str:
        """Findings as JSON: saving and how it was obtained, evidence, file and line, the change, and its diff."""
        words = ["diagnose", self._access.trace(trace), "--json", "-", "--all", *([f"--rule={rule}"] if rule else [])]
        found = json.loads(await self._answer(*words))
        ranks = found.get("ranks", [found])
        every = [*found.get("across_ranks", []), *(each for rank in ranks for each in rank["findings"])]
        every.sort(key=lambda each: -each["saving_ns_per_step"])
        shown = {"shown": min(top, len(every)), "of": len(every), "findings": [_digest(each) for each in every[:top]]}
        return as_data(json.dumps(shown, indent=1, ensure_ascii=False))

    async def explain_rule(self, rule: Annotated[str, Field(description="such as input-bound", pattern=_RULE)]) -> str:
        """What a rule finds, why that costs time, how it is measured, known false positives, and what to do."""
        return await self._answer("explain", rule)

    async def lines(
        self,
        trace: Trace = "",
        file: Annotated[str, Field(description="show this source file line by line, instead of the table")] = "",
        tokens: Tokens = TOKENS,
    ) -> str:
        """What each line of the user's code costs, forward and backward: time, idle time, calls and memory."""
        words = ["lines", self._access.trace(trace)]
        if file:
            words.append(str(self._access.path(file)) if (self._access.folders[0] / file).exists() else f"./{file}")
        return await self._report(*words, tokens=tokens)

    async def whatif(
        self,
        changes: Annotated[
            list[str],
            Field(description="such as remove=input, remove=<rule>, scale=PATTERN=FACTOR, launch-overhead=2us, graphs"),
        ],
        trace: Trace = "",
        tokens: Tokens = TOKENS,
    ) -> str:
        """How long a step would take with these changes, by replaying the recorded one, and what limits it then."""
        known = CHOICES["whatif"]
        for change in changes:
            name, _, value = change.partition("=")
            if name not in known.typed and (name not in known.flags or value):
                forms = [*(f"{each}=VALUE" for each in known.typed), *known.flags]
                raise ToolError(f"{change[:100]} is no change; write one of {', '.join(forms)}")
        return await self._report(
            "whatif", self._access.trace(trace), *(f"--{change}" for change in changes), tokens=tokens
        )

    async def compare(
        self,
        before: Annotated[str, Field(description="path or run's name")],
        after: Annotated[str, Field(description="path or run's name")],
        tokens: Tokens = TOKENS,
    ) -> str:
        """Whether one recording is faster than another, how certain that is, and what makes the difference."""
        return await self._report("compare", *map(self._access.trace, (before, after)), tokens=tokens)

    async def predict(
        self,
        to: Annotated[str, Field(description="devices, such as H100-SXM or L4,A100-SXM-80GB")],
        trace: Trace = "",
        batch: Annotated[int | None, Field(description="another batch size")] = None,
        recorded_batch: Annotated[int | None, Field(description="the recorded one, where the trace tells none")] = None,
        tokens: Tokens = TOKENS,
    ) -> str:
        """How long a step would take on another device, and what limits it there."""
        sizes = {"batch": batch, "recorded-batch": recorded_batch}
        given = [f"--{name}={value}" for name, value in sizes.items() if value is not None]
        return await self._report("predict", self._access.trace(trace), f"--to={to}", *given, tokens=tokens)

    async def query(
        self,
        sql: Annotated[str, Field(description="a SELECT; empty: list the tables and their columns")] = "",
        trace: Trace = "",
        top: Annotated[int, Field(description="most rows", ge=1, le=1000)] = 50,
        tokens: Tokens = TOKENS,
    ) -> str:
        """Ask the trace's tables in SQL; times are nanoseconds from the start of the trace."""
        words = ["query", self._access.trace(trace), f"--top={top}"]
        return await self._report(*words, *([f" {sql}"] if sql.strip() else []), tokens=tokens)

    async def runs(self, tokens: Tokens = TOKENS) -> str:
        """The runs that stepscope has recorded here, the newest last."""
        return await self._report("runs", tokens=tokens)

    async def record(
        self,
        program: Annotated[str, Field(description="one of the command lines that the user allowed")],
        steps: Annotated[int, Field(description="steps to record", ge=1, le=1000)] = 5,
        apply: Annotated[str, Field(description="remedies to try without changing files, such as workers=4")] = "",
        name: Annotated[str, Field(description="of the run; empty: one is made up", pattern=r"^[\w.-]{0,80}$")] = "",
        tokens: Tokens = TOKENS,
    ) -> str:
        """Run a program that the user allowed, record a few of its steps, and diagnose them."""
        self._access.allow(program)
        name = name.lstrip("-.") or time.strftime("assistant-%Y%m%d-%H%M%S")
        words = ["run", f"--steps={steps}", f"--name={name}", "--no-diagnose", *([f"--apply={apply}"] if apply else [])]
        ended = await _run([*STEPSCOPE, *words, *shlex.split(program)], self._access, self._access.record_seconds)
        run = _run_of(name)
        if run is None or not run.traces():
            raise ToolError(f"nothing was recorded; exit code {ended.code}; the end of what was said:\n"
                            + as_data(ended.said[-_MOST_SAID:]))  # fmt: skip
        about = f"Recorded as the run {name}." + (f" The program ended with {ended.code}." if ended.code else "")
        return f"{about}\n{await self.diagnose(name, tokens)}"

    async def bench(
        self,
        program: Annotated[str, Field(description="one of the command lines that the user allowed")],
        other: Annotated[str, Field(description="another one; empty: the same, with the remedies")] = "",
        apply: Annotated[str, Field(description="remedies for the other, such as workers=4")] = "",
        seconds: Annotated[int, Field(description="begin no further round after this time", ge=1, le=3600)] = 120,
        tokens: Tokens = TOKENS,
    ) -> str:
        """Run two programs in turn, without a profiler: which is faster, by how much, and how certain that is."""
        for each in filter(None, (program, other)):
            self._access.allow(each)
        words = [program, other or program, f"--budget={seconds}s", *([f"--apply=B={apply}"] if apply else [])]
        ended = await _run([*STEPSCOPE, "bench", *words], self._access, seconds + self._access.record_seconds)
        return as_data(fitted(ended.output or ended.said, tokens, "Ask for more tokens to see it."))

    async def apply_diff(
        self,
        trace: Trace = "",
        rule: Annotated[str, Field(description="only this rule's changes", pattern=_RULE_OR_NONE)] = "",
        write: Annotated[bool, Field(description="change the files; otherwise only show what would change")] = False,
    ) -> str:
        """The findings' safe changes of the user's own files as a patch, which is applied only if asked."""
        words = ["diagnose", self._access.trace(trace), "--diff", "-", "--all", *([f"--rule={rule}"] if rule else [])]
        patch = await self._answer(*words)
        if not patch.strip():
            return "No finding has a safe change of the files here: make the change that it describes by hand."
        if write and not self._access.writes:
            raise ToolError("files may not be changed here: start stepscope mcp with --write to allow it")
        applied = await self._patch(patch, check=not write)
        return f"{'Applied' if write else 'Not applied, but would apply'}: {applied}\n{as_data(patch)}"

    async def _patch(self, patch: str, *, check: bool) -> str:
        """Apply a patch, or only see whether it applies; return the files that it changes."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "changes.patch"
            file.write_bytes(patch.encode())
            words = ["git", "apply", "--numstat", "--check" if check else "--apply", str(file)]
            try:
                ended = await _run(words, self._access, self._access.seconds)
            except FileNotFoundError as error:
                raise ToolError("applying a patch needs git, which is not installed") from error
        if ended.code:
            raise ToolError(f"the patch does not apply: {ended.said.strip()[-_MOST_SAID:]}")
        changed = [line.split("\t") for line in ended.output.splitlines() if line.count("\t") == 2]
        return ", ".join(f"{name} (+{added} -{removed})" for added, removed, name in changed)

    def table(self, command: Command) -> Callable[..., Awaitable[str]]:
        """The tool of a command that prints one table."""

        async def ask(
            trace: Trace = "",
            top: Annotated[int, Field(description="rows, the costliest first", ge=1, le=1000)] = 20,
            tokens: Tokens = TOKENS,
        ) -> str:
            return await self._report(command.name, self._access.trace(trace), f"--top={top}", tokens=tokens)

        return ask

    async def _report(self, *words: str, tokens: int) -> str:
        """What a command prints, as data; cut to so many tokens."""
        return as_data(fitted(await self._answer(*words), tokens, "Ask for more tokens to see it."))

    async def _answer(self, *words: str) -> str:
        ended = await _run([*STEPSCOPE, *words], self._access, self._access.seconds)
        if ended.code not in (0, 1):
            raise ToolError(ended.reason[:_MOST_SAID])
        return ended.output


def _run_of(name: str) -> Any:
    with contextlib.suppress(StepscopeError):
        return run_named(name)
    return None


def _digest(finding: dict[str, Any]) -> dict[str, Any]:
    """What an assistant needs of a finding's JSON record."""
    remedy = finding["remedy"]
    found = {
        "rule": finding["rule"],
        "title": finding["title"],
        "saves_ms_per_step": round(finding["saving_ns_per_step"] / 1e6, 6),
        "saves_share_of_step": finding["saving_share"],
        "how_obtained": finding["saving_basis"],
        "confidence": finding["confidence"],
        "evidence": [f"{each['name']}: {each['value']} {each['unit']}" for each in finding["evidence"]["figures"]],
        "where": [f"{each['file']}:{each['line']} {each['function']}" for each in finding["where"]],
        "change": remedy["text"],
        "code": remedy["code"],
        "diff": remedy["diff"],
        "apply": ",".join(remedy["apply"]),
    }
    return {key: value for key, value in found.items() if value not in ("", [], None)}


class _Server(MCPServer):
    """Refuses arguments that a tool does not have, or lacks: an answer to another question is worse than none."""

    async def call_tool(self, name: str, arguments: dict[str, Any], *others: Any, **named: Any) -> Any:
        schema = next((tool.input_schema for tool in await self.list_tools() if tool.name == name), None)
        if schema is not None:
            known = schema["properties"]
            if unknown := sorted(set(arguments) - set(known)):
                raise ToolError(f"{name} has no argument {unknown[0][:50]!r}; it has {', '.join(known) or 'none'}")
            if missing := [each for each in schema.get("required", ()) if each not in arguments]:
                raise ToolError(f"{name} needs {' and '.join(missing)}; it takes {', '.join(known)}")
        return await super().call_tool(name, arguments, *others, **named)


def server_for(access: Access) -> MCPServer:
    """The server with its tools, resources and prompts."""
    server = _Server("stepscope", version=__version__, instructions=_INSTRUCTIONS, log_level="WARNING")
    tools = Tools(access)
    reading = (tools.diagnose, tools.findings, tools.explain_rule, tools.lines, tools.whatif, tools.compare,
               tools.predict, tools.query, tools.runs)  # fmt: skip
    for tool in reading:
        server.add_tool(tool, annotations=_READS)
    for command in _TABLES:
        server.add_tool(tools.table(command), name=command.name, description=command.help, annotations=_READS)
    for running in (tools.record, tools.bench):
        server.add_tool(running, annotations=ToolAnnotations(read_only_hint=False, destructive_hint=False))
    server.add_tool(tools.apply_diff, annotations=ToolAnnotations(read_only_hint=False, destructive_hint=True))
    _add_resources(server, tools)
    _add_prompts(server)
    return server


def _add_resources(server: MCPServer, tools: Tools) -> None:
    @server.resource("stepscope://rules/{rule}", mime_type="text/plain")
    async def rule_page(rule: str) -> str:
        """What a rule finds, and what to do about it."""
        return await tools.explain_rule(rule)

    @server.resource("stepscope://runs", mime_type="text/plain")
    async def recorded_runs() -> str:
        """The recorded runs."""
        return await tools.runs()

    @server.resource("stepscope://runs/{name}", mime_type="text/plain")
    async def run_diagnosis(name: str) -> str:
        """The diagnosis of a run."""
        return await tools.diagnose(name)


def _add_prompts(server: MCPServer) -> None:
    @server.prompt()
    def make_this_faster(program: str) -> str:
        """Make a training or inference program faster, and prove it."""
        return (
            f"Make the steps of `{program}` faster. Record it, diagnose the run, and take the finding that saves most "
            "and that you can act on in this code. Make that one change (apply_diff where the finding has a diff), "
            "record again, and compare the two runs. Keep the change only if compare says that it is faster; say by "
            "how much, with its interval. Go on until no finding saves more than 3 % of a step."
        )

    @server.prompt()
    def explain_this_regression(before: str, after: str) -> str:
        """Explain why a recording is slower than another."""
        return (
            f"Compare `{before}` with `{after}`. If the second is slower and that is certain, say which cause, "
            "operator, kernel or line accounts for it; then look at that line's history in version control, and name "
            "the change."
        )
