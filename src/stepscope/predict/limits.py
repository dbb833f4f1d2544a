"""How long a collective takes over a link, and what limits the steps on another device.

The limit is the largest part of the critical path of the replayed steps:

    host               host work, and launches on their way to the device
    input              waits for batches, and copies of them to the device
    communication      waits for other ranks, and data in transit between them
    compute            device work whose arithmetic takes longer than its traffic, at the target's peaks
    memory bandwidth   other device work

Arithmetic and traffic of an operator decide which of the last two limits its work (Williams, Waterman and Patterson,
2009).

A ring of n devices needs 2 (n - 1) hops for an all-reduce and n - 1 for an all-gather or a reduce-scatter, and carries
2 (n - 1) / n, or (n - 1) / n, of the message over each device's link (Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms", 2009; "bus bandwidth" in NCCL's tests):

    time = base + hops * hop + carried bytes / bandwidth

Links of the table use the latencies and bandwidth shares by which NCCL and RCCL choose a protocol; the quickest
protocol counts.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.communication import bus_bytes
from stepscope.analysis.idle import idle_time
from stepscope.errors import UsageError
from stepscope.machine.devices import DevicePeaks
from stepscope.predict.step_replays import ReplayedStep
from stepscope.predict.trace_operations import Labels
from stepscope.whatif.critical_path import path_in_sum
from stepscope.whatif.experiment import Experiment

TABLE_ERROR: Final = 0.25
"""Relative band of a transfer over a link of the table: `benchmarks/scaling_accuracy.py` compares the model with
measured all-reduces.
"""
MOST_DEVICES: Final = 65_536


@dataclass(frozen=True, slots=True)
class Protocol:
    """A protocol of the communication library."""

    base_ns: float  # per collective
    hop_ns: float  # per hop of the ring
    share: float = 1.0  # share of the link's bandwidth that carries data
    most_bytes_s: float = float("inf")  # bandwidth limit


# NCCL 2.18, src/graph/tuning.cc (LL, LL128, Simple; ring): baseLat, hwLat, llMaxBws. LL128 only over NVLink.
# RCCL, src/graph/tuning.cc (LL, Simple; ring).
PROTOCOLS: Final[dict[str, tuple[Protocol, ...]]] = {
    "nvlink": (Protocol(6_600, 600, 0.25, 87.7e9), Protocol(14_000, 1_900, 0.92), Protocol(8_400, 3_400)),
    "pcie": (Protocol(6_600, 1_000, 0.25), Protocol(8_400, 5_700)),
    "network": (Protocol(6_600, 2_700, 0.25), Protocol(8_400, 14_000)),
    "infinity fabric": (Protocol(20_500, 2_300, 0.2), Protocol(27_900, 2_700)),
}


@dataclass(frozen=True, slots=True)
class Link:
    """Interconnect that joins each device to the others.

    Attributes:
        peers: number of links per device where each pair has its own; a ring of fewer devices uses as many of them as
            there are other devices. None where the full bandwidth reaches any device.
    """

    name: str
    bandwidth_bytes_s: float  # reached by collectives, one direction
    protocols: tuple[Protocol, ...] = (Protocol(0.0, 0.0),)  # available protocols; the quickest counts
    peak_bytes_s: float | None = None  # peak of the link; None where unknown
    peers: int | None = None
    error: float = TABLE_ERROR  # relative error of a transfer time
    fitted: bool = False  # whether it was fitted to a recording's collectives
    source: str = ""  # source of the figures
    hardware: str = ""  # one of PROTOCOLS; empty for a bandwidth given by the user

    @property
    def has_latency(self) -> bool:
        """Whether a latency is known; a bandwidth given by the user has none."""
        return any(each.base_ns or each.hop_ns for each in self.protocols)

    def transfer_ns(self, kind: str, message_bytes: float, devices: int) -> float:
        """Nanoseconds of a collective among this many devices, from the last arrival on; 0 for a single device.

        Args:
            kind: one of `stepscope.analysis.communication.KINDS`.
            message_bytes: size of the whole message; for an all-gather what each device holds at the end.
        """
        if devices < 2:
            return 0.0
        hops = 2 * (devices - 1) if kind == "all_reduce" else devices - 1
        bandwidth = self.bandwidth_bytes_s
        if self.peers is not None:
            bandwidth *= min(devices - 1, self.peers) / self.peers
        carried = bus_bytes(kind, 1, devices) * message_bytes
        return min(
            each.base_ns + hops * each.hop_ns + carried / min(bandwidth * each.share, each.most_bytes_s) * 1e9
            for each in self.protocols
        )


@lru_cache(maxsize=1)
def link_table() -> tuple[Link, ...]:
    """List every link with known figures."""
    text = files("stepscope").joinpath("data/links.csv").read_text(encoding="utf-8")
    return tuple(
        Link(
            name=row["name"],
            bandwidth_bytes_s=float(row["reached_gb_s"]) * 1e9,
            hardware=row["hardware"],
            protocols=PROTOCOLS[row["hardware"]],
            peak_bytes_s=float(row["peak_gb_s"]) * 1e9,
            peers=int(row["peers"]) if row["peers"] else None,
            source=row["source"],
        )
        for row in csv.DictReader(text.splitlines())
    )


_LINKS_OF: Final = {"NVIDIA": "nvlink", "AMD": "infinity fabric"}


def link_of(device: DevicePeaks, peak_bytes_s: float | None = None) -> Link | None:
    """Link between several devices of a kind, by one-way peak bandwidth; None where the table has none.

    Args:
        peak_bytes_s: by default the device's own interconnect peak.
    """
    peak = device.peer_link_bytes_s if peak_bytes_s is None else peak_bytes_s
    found = ("pcie", _LINKS_OF.get(device.vendor, "pcie"))
    return next((link for link in link_table() if link.peak_bytes_s == peak and link.hardware in found), None)


def check_link(link: Link, device: DevicePeaks) -> None:
    """Raise UsageError, which names the links of the device, if it is known not to have this one.

    Any device can be in a network, and a bandwidth is taken as given.
    """
    if not _may_have(device, link):
        own = [each.name for each in link_table() if each.hardware != "network" and _may_have(device, each)]
        has = f"it has {', '.join(own)}" if own else "it has none of the table but networks"
        raise UsageError(f"the {device.name} has no {link.name}: {has}; a bandwidth such as 12GB/s is taken as given")


def _may_have(device: DevicePeaks, link: Link) -> bool:
    if link.hardware in ("", "network") or link.peak_bytes_s is None:
        return True
    if link.hardware == "pcie":
        return link.peak_bytes_s <= (device.host_link_bytes_s or link.peak_bytes_s)
    of_maker = not device.vendor or _LINKS_OF.get(device.vendor) == link.hardware
    return of_maker and device.peer_link_bytes_s in (None, link.peak_bytes_s)


_TYPED: Final = re.compile(
    r"(\d{1,15}(?:\.\d{1,9})?)([kMGT]?)(B|b|bit)(?:/s|ps)(?:\+(\d{1,9}(?:\.\d{1,9})?)(ns|us|ms))?"
)
_FACTORS: Final = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "ns": 1.0, "us": 1e3, "ms": 1e6}
FASTEST: Final = 1e15  # faster than any link: beyond this the rate cannot be measured


def named_link(text: str) -> Link:
    """Find a link by name, ignoring case and punctuation, or by bandwidth: "nvlink4", "12GB/s", "100Gb/s+20us".

    B are bytes, b and bit are bits; + adds the latency of each hop.

    Raises:
        UsageError: no link has that name; the message names those that exist.
    """
    wanted = re.sub(r"[^a-z0-9]", "", text.lower())
    for link in link_table():
        if re.sub(r"[^a-z0-9]", "", link.name) == wanted:
            return link
    typed = _TYPED.fullmatch(re.sub(r"\s+", "", text))
    if typed is not None:
        bandwidth = float(typed[1]) * _FACTORS[typed[2]] / (1 if typed[3] == "B" else 8)
        if 0 < bandwidth <= FASTEST:
            hop = float(typed[4]) * _FACTORS[typed[5]] if typed[4] else 0.0
            return Link(text.strip(), bandwidth, (Protocol(0.0, hop),), source="as given")
    names = ", ".join(link.name for link in link_table())
    raise UsageError(f"{text!r} is neither a link in the table nor a bandwidth such as 12GB/s: {names}")


def fitted_link(
    name: str, kinds: Sequence[str], message_bytes: Sequence[float], transfer_ns: Sequence[float], devices: int
) -> Link:
    """Fit a link's latency and rate to collectives among this many devices, by least squares.

    Neither is negative. Errors are relative to the time, so that small messages weigh as much as large ones. If all
    messages have one size, the whole time is attributed to the rate. The link's `error` is the median relative
    deviation, or the table's with fewer than three sizes.

    Raises:
        UsageError: fewer than two devices, or no collective that took time.
    """
    rows = zip(kinds, message_bytes, transfer_ns, strict=True)
    known = [(kind, size, time) for kind, size, time in rows if size > 0 and time > 0]
    if devices < 2 or not known:
        raise UsageError("a link can only be fitted to collectives of known size among two devices or more")
    time = np.array([each[2] for each in known], np.float64)
    hops = np.array([2 * (devices - 1) if each[0] == "all_reduce" else devices - 1 for each in known], np.float64)
    carried = np.array([bus_bytes(each[0], 1, devices) * each[1] for each in known], np.float64)
    hop_ns, byte_ns = _least_squares(hops / time, carried / time)
    off = np.abs((hop_ns * hops + byte_ns * carried) / time - 1)
    several = len(np.unique(carried)) > 2
    return Link(
        name,
        1e9 / byte_ns if byte_ns > 0 else FASTEST,
        (Protocol(0.0, hop_ns),),
        error=float(np.median(off)) if several else TABLE_ERROR,
        fitted=True,
        source=f"fitted to {len(known)} collectives of the recording",
    )


def _least_squares(first: npt.NDArray[np.float64], second: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Non-negative coefficients with which the columns add up to 1 as nearly as possible."""
    ratio = first / second
    alone = float(second.sum() / (second @ second))
    if np.ptp(ratio) <= 1e-9 * float(ratio.max()):
        return 0.0, alone
    hop, byte = np.linalg.lstsq(np.column_stack([first, second]), np.ones(len(first)), rcond=None)[0].tolist()
    if byte <= 0:
        return float(first.sum() / (first @ first)), 0.0
    return (hop, byte) if hop > 0 else (0.0, alone)


LIMITS: Final = ("compute", "memory bandwidth", "host", "input", "communication")
Parts: TypeAlias = dict[tuple[str, str], float]  # nanoseconds by limit and cause

_GROUP: Final = {
    "compute": "device", "memory bandwidth": "device", "host": "host", "input": "host",
    "communication": "communication", "unknown": "unknown",
}  # fmt: skip
ON_HOST: Final = {"input": "input", "host_to_device_copy": "input", "communication": "communication"}
"""Host causes that are limits of their own."""
_OPEN: Final = ("unknown", "dependency", "untraced", "synchronisation")
"""Causes of idle time that do not say what was waited for."""
_HIDDEN: Final = ("copy_in", "copy_out", "copy_on_device", "communication")
_OF_WORK: Final = {"communication": "communication", "copy_in": "input", "copy_out": "host"}


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit of a step."""

    name: str  # one of LIMITS
    share: float  # of the critical path, 0 to 1
    cause: str | None = None  # for the host limit, the cause with most of its time; None for others


def limit_of(experiment: Experiment, step: ReplayedStep, sides: Labels) -> Limit | None:
    """Find what limits a step; None where the trace does not show it.

    First the host, the device and communication are compared; then, on the host, input against every other cause, and
    on the device, compute against memory bandwidth.

    Args:
        step: the step as replayed, or with only its length and the device's busy time.
        sides: "compute" or "memory bandwidth" for each row of `device_work`.
    """
    if step.replay is None:
        return _without_replay(experiment, step, sides)
    path = path_in_sum(experiment, step.replay)
    return _largest(_parts(experiment, path, sides), max(int(path["duration_ns"].sum()), 1))


def _largest(parts: Parts, total_ns: float) -> Limit | None:
    groups: dict[str, float] = {}
    for (name, _), ns in parts.items():
        groups[_GROUP[name]] = groups.get(_GROUP[name], 0.0) + ns
    if not groups:
        return None
    group = max(sorted(groups), key=lambda name: groups[name])
    inside = {key: ns for key, ns in parts.items() if _GROUP[key[0]] == group}
    if group == "host":
        name, cause = max(sorted(inside), key=lambda key: inside[key])
        share = sum(ns for key, ns in inside.items() if key[0] == name) / total_ns
        return Limit(name, share, cause if name == "host" else None)
    if group == "unknown":
        return None
    sums = {name: sum(ns for key, ns in inside.items() if key[0] == name) for name, _ in inside}
    name = max(sorted(sums), key=lambda name: sums[name])
    return Limit(name, sums[name] / total_ns)


def _parts(experiment: Experiment, path: pl.DataFrame, sides: Labels) -> Parts:
    row = pl.when(pl.col("table") == "device_work").then("row")
    work = pl.DataFrame({"does": experiment.trace.device_work["kind"], "side": sides}).with_row_index("row")
    found = path.with_columns(row=row).join(work, on="row", how="left", maintain_order="left")
    sums = found.group_by("kind", "cause", "table", "does", "side", maintain_order=True).agg(
        pl.col("duration_ns").sum()
    )
    parts: Parts = {}
    for kind, cause, table, does, side, ns in sums.iter_rows():
        if kind == "host":
            key = ON_HOST.get(cause, "host"), str(cause or "untraced")
        elif kind == "launch_latency":
            key = "host", "launch_latency"
        elif kind == "wait":
            key = "unknown", ""
        elif table == "device_work":
            key = _OF_WORK.get(does, side), ""
        else:
            key = "communication", ""
        parts[key] = parts.get(key, 0.0) + ns
    return parts


def _without_replay(experiment: Experiment, step: ReplayedStep, sides: Labels) -> Limit | None:
    """Use the device's busy time, by side, and its measured idle time, by cause."""
    parts: Parts = {}
    works = experiment.works
    durations = experiment.graph.works.duration[works] * step.factors[works]
    kinds = experiment.trace.device_work["kind"].to_numpy()[works]
    names = np.array([_OF_WORK.get(kind, str(side)) for kind, side in zip(kinds, sides[works], strict=True)], np.str_)
    # Work that usually overlaps computation counts unless computation covers most of it.
    own = np.isin(kinds, _HIDDEN, invert=True)
    own = own | (durations[own].sum() <= 0.5 * durations.sum())
    for name in np.unique(names[own]).tolist():
        share = durations[own & (names == name)].sum() / max(float(durations[own].sum()), 1.0)
        parts[name, ""] = step.device_ns * share
    idle_ns = max(step.step_ns - step.device_ns, 0.0)
    for cause, share in _idle_causes(experiment).items():
        unknown = cause in _OPEN
        parts["unknown" if unknown else ON_HOST.get(cause, "host"), cause] = idle_ns * share
    return _largest(parts, step.step_ns)


def _idle_causes(experiment: Experiment) -> dict[str, float]:
    idle = idle_time(experiment.trace, window=experiment.span, activity=experiment.activity)
    idle = idle.filter(pl.col("device") == experiment.device, pl.col("cause") != "once")  # no step has it again
    sums = idle.group_by("cause").agg(pl.col("duration_ns").sum())
    total = max(int(sums["duration_ns"].sum()), 1)
    return {cause: ns / total for cause, ns in sums.iter_rows()}
