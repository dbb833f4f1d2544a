"""`stepscope watch`: record a running job now and then, keep a summary of each recording, and tell what changed."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from stepscope.commands.record.attach import add_targets, positive_seconds, step_count
from stepscope.commands.record.servers import find_targets
from stepscope.commands.shared import output
from stepscope.commands.shared.options import (
    SECONDS,
    SHARES,
    Command,
    CommandParser,
    add_record_flags,
    add_user_code_options,
    file_to_write,
    number,
    whole,
)
from stepscope.commands.watch.job import Tell, Watch
from stepscope.errors import AgentError, UsageError
from stepscope.report.format import span

if TYPE_CHECKING:
    from stepscope.commands.watch.delivery import Deliveries, Metrics
    from stepscope.record.watch_log import Watched

_EVERY_S: Final = 600.0
_STEPS: Final = 5
_MOST_COST: Final = 0.005
_PATIENCE_S: Final = 3600.0
_NICE: Final = 10
_FINISH_S: Final = 10.0
_times: Final = {unit: seconds for unit, seconds in SECONDS.items() if unit != "ms"}
_interval = number("is not an interval from 1s to 24h: write 10m", _times, least=1, most=86_400)
_patience = number("is not a time: write 1h", _times, most=1e9)
_cost = number("is not a share above 0: write 0.5% or 0.005", SHARES, above=0, most=1)


def follow(watch: Watch, show: Callable[[Watched], None]) -> None:
    """Record until the job has ended, could not be recorded for too long, or `watch.ended` is set.

    Raises AgentError if no recording succeeded.
    """
    left, has_any = watch.arguments.repeat, False
    while not watch.ended.is_set():
        begun_s = time.monotonic()
        found = watch.record()
        if found is None:
            watch.tell(f"{watch.job} has ended, and so does the watch")
            return
        show(found)
        has_any = has_any or found.problem is None
        left = None if left is None else left - 1
        if found.problem is not None and watch.is_lost:
            watch.tell(f"{watch.job} could not be recorded for {span(watch.arguments.patience)}: the watch ends")
            left = 0
        if left == 0:
            break
        watch.ended.wait(max(0.0, watch.pause_s - (time.monotonic() - begun_s)))
    if not has_any and not watch.ended.is_set():
        raise AgentError("nothing was recorded")


class Outlets:
    """Everything that gets a recording besides the terminal: alerts, metrics and the file of --json."""

    def __init__(self, arguments: argparse.Namespace, tell: Tell) -> None:
        from stepscope.commands.watch import delivery

        sends = [*map(delivery.webhook, arguments.webhook), *map(delivery.command, arguments.on_alert)]
        self._deliveries: Deliveries = delivery.Deliveries(sends, tell)
        self._metrics: Metrics | None = None if arguments.metrics is None else delivery.Metrics(arguments.metrics)
        self._json, self._tell = arguments.json, tell
        if self._metrics is not None:
            tell(f"metrics are at {self._metrics.url}")

    def take(self, watch: Watch, found: Watched) -> None:
        from stepscope.report.document import compact_json
        from stepscope.report.watch import alert_json, metrics, recording_json

        if self._metrics is not None:
            firing = {alert.text: alert.is_firing for alert in watch.alerts}
            self._metrics.text = metrics(watch.job, watch.history, firing)
        for event in found.events:
            self._deliveries.add(alert_json(watch.job, found.unix_s, event))
        if self._json is not None:
            self._append(compact_json(recording_json(watch.history)) + b"\n")

    def close(self) -> None:
        self._deliveries.finish(_FINISH_S)
        if self._metrics is not None:
            self._metrics.close()

    def _append(self, line: bytes) -> None:
        if self._json == "-":
            output.print_text(line.decode())
            return
        try:
            with open(self._json, "ab") as file:
                file.write(line)
        except OSError as error:
            self._tell(f"{self._json} cannot be written: {error.strerror}")


def _run(arguments: argparse.Namespace) -> int:
    _give_way()
    from stepscope.compare.watching import parsed_alert
    from stepscope.record.watch_log import WatchLog

    alerts = [parsed_alert(text) for text in arguments.alert]
    if (arguments.webhook or arguments.on_alert) and not alerts:
        raise UsageError("--webhook and --on-alert need an alert, such as --alert 'step_ms > 300'")
    servers = () if arguments.through_files else find_targets(arguments.targets).servers
    if servers:
        raise UsageError(
            f"{servers[0]} is a profiler server, which does not know steps: watch an agent (stepscope.start_server()), "
            f"or record it repeatedly with stepscope attach {servers[0]} --repeat 10 --every 10m"
        )
    screen = _screen(arguments)
    tell = output.say if screen is None else screen.tell
    outlets = Outlets(arguments, tell)
    try:
        watch = Watch(arguments, alerts, WatchLog(), tell)
        tell(f"{arguments.steps} steps of {watch.job} are recorded every {span(arguments.every)}")

        def shown(found: Watched) -> None:
            outlets.take(watch, found)
            line, *events = lines_of(watch, found)
            if screen is not None:
                screen.show(events)
            elif arguments.json != "-":
                output.print_text("".join(f"{each}\n" for each in (line, *events)))

        if screen is None:
            follow(watch, shown)
        else:
            screen.follow(watch, lambda: follow(watch, shown))
    finally:
        outlets.close()
    return 0


def lines_of(watch: Watch, found: Watched) -> list[str]:
    """The latest recording and its alerts, a line each."""
    from stepscope.report.format import printable
    from stepscope.report.watch import clock, line_of

    words = [f"{clock(found.unix_s)}  {event.state}: {printable(event.sentence)}" for event in found.events]
    return [line_of(watch.history), *words]


def _give_way() -> None:
    """Leave the processors to the job, which often runs on this machine."""
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    with contextlib.suppress(OSError, AttributeError):  # Windows has no such numbers
        os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), _NICE))


def _screen(arguments: argparse.Namespace) -> Any:
    """The view of a terminal; None for plain lines: if wanted, without a terminal, or without Textual."""
    if arguments.plain or arguments.json == "-" or not (sys.stdout.isatty() and sys.stdin.isatty()):
        return None
    try:
        from stepscope.commands.watch.screen import Screen
    except ModuleNotFoundError:
        output.say("plain lines are shown: pip install 'stepscope[watch]' for a view of the last hours")
        return None
    return Screen()


def _prepare_parser(parser: CommandParser) -> None:
    add_targets(parser)
    parser.add_argument("--name", metavar="JOB", help="the job's name in the log (default: the targets)")
    when = parser.add_argument_group("recordings")
    when.add_argument("--every", metavar="TIME", type=_interval, default=_EVERY_S, help="between two (default: 10m)")
    when.add_argument("--steps", metavar="N", type=step_count, default=_STEPS, help=f"of each (default: {_STEPS})")
    when.add_argument(
        "--most-cost",
        metavar="SHARE",
        type=_cost,
        default=_MOST_COST,
        help="record less often if recordings take more than this from the job (default: 0.5%%)",
    )
    when.add_argument("--repeat", metavar="N", type=step_count, help="end after so many (default: when the job ends)")
    when.add_argument(
        "--patience",
        metavar="TIME",
        type=_patience,
        default=_PATIENCE_S,
        help="end after so long without an answer (1h)",
    )
    when.add_argument(
        "--keep", metavar="N", type=whole(1, 1000), default=3, help="traces of the latest N, and of N with an alert (3)"
    )
    when.add_argument(
        "--timeout", metavar="SECONDS", type=positive_seconds, default=60.0, help="give up without a step (60)"
    )
    record = parser.add_argument_group("what is recorded besides times")
    add_record_flags(record, without=("memory", "lines"))
    alerts = parser.add_argument_group("alerts")
    alerts.add_argument(
        "--alert", metavar="WHEN", action="append", default=[], help="such as 'step_ms > 300'; may be repeated"
    )
    alerts.add_argument(
        "--webhook", metavar="URL", action="append", default=[], help="POST alerts there as JSON; may be repeated"
    )
    alerts.add_argument(
        "--on-alert", metavar="COMMAND", action="append", default=[], help="start this for each; may be repeated"
    )
    outputs = parser.add_argument_group("output")
    outputs.add_argument("--metrics", metavar="HOST:PORT", help="serve OpenMetrics, for Prometheus, at /metrics there")
    outputs.add_argument(
        "--json", metavar="FILE", type=file_to_write, help="append each recording as a line of JSON; - prints it"
    )
    outputs.add_argument("--plain", action="store_true", help="a line for each recording, on a terminal too")
    group = parser.add_argument_group("reaching the processes")
    group.add_argument("--through-files", action="store_true", help="through files in the run folder, not a connection")
    group.add_argument("--token", metavar="TOKEN", help="the agent's token, if its file cannot be read here")
    add_user_code_options(parser)


COMMAND: Final = Command(
    "watch",
    "Record a few steps of a running job every ten minutes, and tell when it slows down.",
    _prepare_parser,
    _run,
    """\
Several targets are the processes of one job, and are recorded at the same steps. The job goes on whatever happens
to the watch. Each recording's summary is kept; stepscope view shows it, in the tab Watch.

alerts: METRIC > NUMBER [for N], also >=, < and <=, after N recordings in a row (default: 2); METRIC changes [N%].
metrics: step_ms, recorded_step_ms, idle_percent, idle_percent.CAUSE, communication_percent, wait_ms, memory_gib,
device_memory_gib, memory_gib_per_hour, device_memory_gib_per_hour, cost_percent, failures

examples:
  stepscope watch my-run                                     every rank of a run that was started with --serve
  stepscope watch localhost:8790 localhost:8791              two processes of one job, by their agents' addresses
  stepscope watch my-run --alert 'step_ms changes' --alert 'failures >= 1 for 1' --webhook https://HOST/PATH
  stepscope watch my-run --metrics 0.0.0.0:9464              for Prometheus
  stepscope watch my-run --repeat 1 --json -                 once, from cron
""",
)
