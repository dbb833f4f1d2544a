"""What a rank's collectives take over another device's link: data on the way changes with the link, waiting does not.

A collective lasts from a rank's arrival to the end, so that it has waiting for late ranks in it. With t the time that
the message needs over the recorded device's link, at most what the quickest recorded collective of its size took, and
t' the same over the target's link:

    expected    measured - t + t'
    low         t' less the links' error: nobody waits
    high        the longer of measured and expected with the links' error

Of communication that tells no more than its duration the same share is taken to be data as of these collectives
together, and its data to take as many times as long as theirs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stepscope.devices import DevicePeaks
from stepscope.predict.exchanges import RecordedExchange
from stepscope.predict.links import TABLE_ERROR, link_of
from stepscope.predict.operations import Numbers
from stepscope.predict.work_times import WorkTimes


def with_transfers(times: WorkTimes, exchange: RecordedExchange, source: DevicePeaks, target: DevicePeaks) -> WorkTimes:
    """The times with collectives over the target's link in place of all their time by the links' bandwidths.

    Only works whose basis is "link" are changed.
    """
    rows = exchange.table["row"].to_numpy()
    there = rows < len(times)
    there[there] = times.basis[rows[there]] == "link"
    if not there.any():
        return times
    before, after = (each[there] for each in _transfers(exchange, source, target))
    rows = rows[there]
    share = before.sum() / times.measured_ns[rows].sum()
    others = np.setdiff1d(np.flatnonzero(times.basis == "link"), rows)
    data, longer = times.measured_ns[others] * share, after.sum() / before.sum()
    rows, before, after = (np.concatenate(pair) for pair in ((rows, others), (before, data), (after, data * longer)))
    measured = times.measured_ns[rows]
    ns, low, high = times.ns.copy(), times.low_ns.copy(), times.high_ns.copy()
    ns[rows] = measured - before + after
    low[rows] = np.minimum(after * (1 - TABLE_ERROR), ns[rows])
    high[rows] = np.maximum(measured, ns[rows] + after * TABLE_ERROR)
    return replace(times, ns=ns, low_ns=low, high_ns=high)


def _transfers(exchange: RecordedExchange, source: DevicePeaks, target: DevicePeaks) -> tuple[Numbers, Numbers]:
    """How long each collective's data are on the way over the source's link and over the target's."""
    links = link_of(source), link_of(target)
    slower = (source.peer_link_bytes_s or 1.0) / (target.peer_link_bytes_s or 1.0)
    factors = [
        slower
        if size is None or links[0] is None or links[1] is None
        else links[1].transfer_ns(kind, size, exchange.ranks) / links[0].transfer_ns(kind, size, exchange.ranks)
        for kind, size in exchange.table.select("kind", "bytes").iter_rows()
    ]
    before = exchange.by_link_of(source).table["transfer_ns"].to_numpy().astype(np.float64)
    return before, before * np.array(factors)
