"""Duration of a collective over a link: a latency per hop and a rate, from the table or fitted to a recording.

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
from typing import Final

import numpy as np
import numpy.typing as npt

from stepscope.analysis.communication import bus_bytes
from stepscope.errors import UsageError
from stepscope.machine.devices import DevicePeaks

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

    @property
    def has_latency(self) -> bool:
        """Whether a latency is known; a bandwidth given by the user has none."""
        return any(each.base_ns or each.hop_ns for each in self.protocols)

    def transfer_ns(self, kind: str, message_bytes: float, devices: int) -> float:
        """Nanoseconds of a collective among so many devices, from the last arrival on; 0 for a single device.

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
            protocols=PROTOCOLS[row["hardware"]],
            peak_bytes_s=float(row["peak_gb_s"]) * 1e9,
            peers=int(row["peers"]) if row["peers"] else None,
            source=row["source"],
        )
        for row in csv.DictReader(text.splitlines())
    )


_LINKS_OF: Final = {"NVIDIA": "nvlink", "AMD": "infinity-fabric"}


def link_of(device: DevicePeaks, peak_bytes_s: float | None = None) -> Link | None:
    """Link between several devices of a kind, by one-way peak bandwidth; None where the table has none.

    Args:
        peak_bytes_s: by default the device's own interconnect peak.
    """
    peak = device.peer_link_bytes_s if peak_bytes_s is None else peak_bytes_s
    found = ("pcie", _LINKS_OF.get(device.vendor, "pcie"))
    return next((link for link in link_table() if link.peak_bytes_s == peak and link.name.startswith(found)), None)


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
    raise UsageError(f"{text!r} is neither a link that the table knows nor a bandwidth such as 12GB/s: {names}")


def fitted_link(
    name: str, kinds: Sequence[str], message_bytes: Sequence[float], transfer_ns: Sequence[float], devices: int
) -> Link:
    """Fit a link's latency and rate to collectives of so many devices by least squares.

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
