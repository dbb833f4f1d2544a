"""Logs of a whole job, which have reports of their own: operations of all ranks, and collectives."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from stepscope.commands.shared import output
from stepscope.commands.shared.reading import redacted, trace_paths
from stepscope.errors import StepscopeError
from stepscope.report.brief import as_data, fitted
from stepscope.report.format import printable

if TYPE_CHECKING:
    from stepscope.analysis.desync import Desync
    from stepscope.readers.collective_logs import CollectiveLogs
    from stepscope.report.document import Document

Logged: TypeAlias = "tuple[str, CollectiveLogs, Desync]"
"""Where logs of collectives are, what they hold, and what it shows."""
_REPORT_ROWS: Final = 20
_ASSISTANT_WIDTH: Final = 160


def report_rows(arguments: argparse.Namespace) -> int:
    """Rows of tables in reports, 0 for all."""
    return arguments.top if arguments.top is not None else _REPORT_ROWS


def is_answered_as_job(arguments: argparse.Namespace) -> bool:
    """Whether the file is a log of all ranks' operations, which has a report of its own."""
    from stepscope.readers.operation_log import operation_log

    path = arguments.paths[0]
    log = operation_log(path) if os.path.isfile(path) else None
    if log is None:
        return False
    from stepscope.analysis.stragglers import stragglers
    from stepscope.report.stragglers import stragglers_document, stragglers_json

    found = stragglers(log)
    top = report_rows(arguments)
    _write_document(
        arguments, lambda: stragglers_document(path, found), top=top, json=lambda: stragglers_json(path, found)
    )
    return True


def logs_among(arguments: argparse.Namespace) -> Logged | None:
    """What the logs of collectives among the paths show, if any; arguments keep the paths that have traces too."""
    from stepscope.readers.collective_logs import collective_logs, log_files

    by_path = {path: log_files(path) for path in arguments.paths if path != "-"}
    files = [file for found in by_path.values() for file in found]
    if not files:
        return None
    from stepscope.analysis.desync import desync

    def has_traces(path: str) -> bool:
        try:
            return not by_path.get(path) or (os.path.isdir(path) and bool(trace_paths(path)))
        except StepscopeError:
            return False

    path = arguments.paths[0] if len(by_path) == 1 else f"{len(files)} logs"
    arguments.paths = [path for path in arguments.paths if has_traces(path)]
    try:
        logs = collective_logs(files)
    except StepscopeError as error:
        if not arguments.paths:
            raise
        print(f"stepscope: skipped: {printable(str(error))}", file=sys.stderr)
        return None
    names = {
        name
        for process in logs.processes
        for name in (process.host, process.name)
        if process.rank is None or name == process.host
    }
    found = redacted(arguments, (logs, desync(logs)), sorted(names - {""}), [str(file) for file in files])
    return (redacted(arguments, path), *found)


def write_logged(arguments: argparse.Namespace, logged: Logged) -> None:
    from stepscope.report.desync import desync_document, desync_json

    top = report_rows(arguments)
    _write_document(arguments, lambda: desync_document(*logged), top=top, json=lambda: desync_json(*logged))


def _write_document(
    arguments: argparse.Namespace, document: Callable[[], Document], *, top: int, json: output.Report
) -> None:
    """Write the reports of what is no trace, and print it as the arguments want it."""
    output.write_reports(arguments, document, top=top, is_printed=not arguments.for_assistant, json=json)
    if arguments.for_assistant:
        print_for_assistant(arguments, document(), top)


def print_for_assistant(arguments: argparse.Namespace, document: Document, top: int) -> None:
    from stepscope.report.text import text_of

    text = text_of(document, width=_ASSISTANT_WIDTH, top=top)
    output.print_text(as_data(fitted(text, arguments.tokens, "A larger --tokens shows it.")))
