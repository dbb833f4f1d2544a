"""Record through the profiler servers that XLA runs in JAX, PyTorch/XLA and TensorFlow programs."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stepscope.commands.shared.options import record_options
from stepscope.commands.shared.output import say
from stepscope.errors import AgentError, StepscopeError, UsageError
from stepscope.record.schedule import RecordOptions

if TYPE_CHECKING:
    from stepscope.record.profiler_server import HostProfile, ProfilerOrder
    from stepscope.record.run_folder import RunFolder

_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of a command, by kind.

    Attributes:
        agents: targets that are agents of stepscope, or may be.
        servers: addresses of profiler servers.
        unreachable: addresses that do not answer, and why.
        order: every target, in the order given.
    """

    agents: tuple[str, ...]
    servers: tuple[str, ...]
    unreachable: tuple[tuple[str, AgentError], ...]
    order: tuple[str, ...]


def find_targets(targets: Sequence[str]) -> Targets:
    """Find out what listens at each target's address; a target may be a list separated by commas.

    Raises:
        UsageError: there is no such port.
    """
    from stepscope.record.agent.client import for_each
    from stepscope.record.agent.targets import Listener, address_of, listener_at

    words = [word for target in targets for word in _split(target)]
    addresses = [address_of(word) for word in words]

    def look(address: str | None) -> Listener | AgentError:
        try:
            return Listener.AGENT if address is None else listener_at(address)
        except AgentError as error:
            return error

    seen = list(zip(words, addresses, for_each(addresses, look), strict=True))
    return Targets(
        agents=tuple(word for word, _, found in seen if found is Listener.AGENT),
        servers=tuple(dict.fromkeys(a for _, a, found in seen if a is not None and found is Listener.PROFILER_SERVER)),
        unreachable=tuple((a or word, found) for word, a, found in seen if isinstance(found, AgentError)),
        order=tuple(dict.fromkeys(a or word for word, a, _ in seen)),
    )


def _split(target: str) -> list[str]:
    """The addresses of a list with commas; any other target stays whole."""
    from stepscope.record.agent.targets import address_of

    words = [word.strip() for word in target.split(",")]
    return words if len(words) > 1 and any(address_of(word) for word in words if word) else [target]


def record_servers(arguments: argparse.Namespace, targets: Targets) -> list[Path]:
    """Record the profiler servers --repeat times, and return the profiles of the last time.

    Raises:
        UsageError: options that a profiler server does not support.
        AgentError: no host sent a profile.
    """
    from stepscope.record.profiler_server import check_client

    order = _order(arguments)
    check_client()
    run = _new_run(arguments, targets.servers) if arguments.output is None else None
    recording = _ServerRecording(
        run, run.path if run is not None else arguments.output.absolute(), targets.order, order
    )
    for address, error in targets.unreachable:
        recording.failed(address, str(error))
    try:
        last = _repeated(arguments, targets.servers, recording)
    finally:
        recording.end()
    recording.say_where()
    return last


def _repeated(arguments: argparse.Namespace, servers: Sequence[str], recording: _ServerRecording) -> list[Path]:
    """Record --repeat times and return the profiles of the last time; end early if no host answers."""
    last: list[Path] = []
    for number in range(1, arguments.repeat + 1):
        begun_s = time.monotonic()
        try:
            last = recording.record(servers, number, arguments.repeat)
        except AgentError:
            if not last:
                raise
            say(f"no host answered for capture {number}, so there are no more")
            break
        if number < arguments.repeat:
            time.sleep(max(0.0, arguments.every - (time.monotonic() - begun_s)))
    return last


class _ServerRecording:
    """The profiles of several hosts, kept in a run folder or in a folder that the user named."""

    def __init__(self, run: RunFolder | None, folder: Path, addresses: Sequence[str], order: ProfilerOrder) -> None:
        self.folder = folder
        self._run = run
        self._order = order
        self._hosts: dict[str, dict[str, Any]] = {
            address: {"rank": rank, "host": address, "captures": 0, "seconds": order.seconds}
            for rank, address in enumerate(addresses)
        }
        self._traces: list[Path] = []

    def failed(self, address: str, problem: str) -> None:
        say(problem)
        self._hosts[address]["problem"] = problem

    def record(self, servers: Sequence[str], number: int, of: int) -> list[Path]:
        """Record every host once, and return the profiles.

        Raises:
            AgentError: no host sent one.
        """
        from stepscope.record.profiler_server import capture_hosts

        profiles = capture_hosts(servers, self._order, self.folder)
        for profile in profiles:
            if profile.path is None:
                self.failed(profile.address, profile.problem or f"{profile.address}: nothing was recorded")
        done = [profile for profile in profiles if profile.path is not None]
        if not done:
            raise AgentError("nothing was recorded" if len(profiles) > 1 else f"nothing was recorded from {servers[0]}")
        which = f"capture {number} of {of}: " if of > 1 else ""
        say(f"{which}recorded {self._order.seconds:g} s of {', '.join(profile.address for profile in done)}")
        return [self._kept(profile) for profile in done]

    def _kept(self, profile: HostProfile) -> Path:
        """Store the profile where every command finds it as a trace of the run."""
        from stepscope.record.profiler_server import link_or_copy
        from stepscope.record.run_folder import xplane_name

        host = self._hosts[profile.address]
        host["captures"] += 1
        path = profile.path or Path()
        if self._run is not None:
            link_or_copy(path, xplane_name(self._run.new_trace_path(host["rank"])))
        if host["rank"] == min(each["rank"] for each in self._hosts.values() if each["captures"]):
            self._traces.append(path)
        return path

    def say_where(self) -> None:
        say(f"the profiles are in {self.folder}, for tensorboard --logdir too")
        if len(self._traces) > 1:
            first, last = shlex.quote(str(self._traces[0])), shlex.quote(str(self._traces[-1]))
            say(f"to see whether the steps changed: stepscope compare {first} {last}")

    def end(self) -> None:
        if self._run is not None:
            code = 0 if any(host["captures"] for host in self._hosts.values()) else 2
            self._run.write_manifest(self._run.manifest().ended(time.time(), code, list(self._hosts.values())))
            _remember(self._run)


def _order(arguments: argparse.Namespace) -> ProfilerOrder:
    """The recording order from the options; raises `UsageError` for those that a profiler server does not support."""
    from stepscope.record.profiler_server import MOST_SECONDS, ProfilerOrder

    if arguments.steps is not None:
        raise UsageError("a profiler server does not know steps: say how long to record, such as --seconds 2")
    seconds = _SECONDS if arguments.seconds is None else arguments.seconds
    if seconds > MOST_SECONDS:
        raise UsageError(f"a profiler server records for {MOST_SECONDS:g} s at most, not {seconds:g}")
    if arguments.output is not None and arguments.output.suffix in (".json", ".gz", ".pb"):
        raise UsageError(f"profiles of servers go to a folder: {arguments.output} is the name of a file")
    asked = record_options(arguments)
    ignored = [
        option.name
        for option in fields(RecordOptions)
        if option.name != "stacks" and getattr(asked, option.name) and not option.default
    ]
    if ignored:
        say(f"a profiler server does not record {' and '.join(ignored)}; of these options only --stacks matters")
    return ProfilerOrder(
        seconds=seconds, host_level=arguments.host_tracer_level, python_frames=asked.stacks, timeout_s=arguments.timeout
    )


def _new_run(arguments: argparse.Namespace, servers: Sequence[str]) -> RunFolder:
    from stepscope.record.manifest import RunManifest
    from stepscope.record.profiler_server import file_name
    from stepscope.record.run_folder import RunFolder

    words = ["stepscope", "attach", ",".join(servers), "--seconds", f"{arguments.seconds or _SECONDS:g}"]
    options = {"profiler_server": True, "host_tracer_level": arguments.host_tracer_level, "repeat": arguments.repeat}
    manifest = RunManifest.begin(words, time.time(), options=options, redact=False)
    manifest = replace(manifest, git=None, environment={})  # both would be this command's, not the program's
    moment = time.strftime("%Y%m%d-%H%M%S")
    folder = RunFolder.create(None, None, manifest, suggestion=f"attach-{file_name(servers[0])[:60]}-{moment}")
    _remember(folder)
    return folder


def _remember(folder: RunFolder) -> None:
    from stepscope.record.runs import RunIndex

    try:
        RunIndex().add(folder)
    except StepscopeError as error:  # the profiles matter more than the list of runs
        say(str(error))
