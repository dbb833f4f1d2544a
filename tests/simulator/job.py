"""A job whose simulated ranks wait for each other: with a cause gone, the program is run again without it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulator.device import Queue, Work
from tests.simulator.host import Host
from tests.simulator.kineto import kineto_bytes
from tests.simulator.machine import Machine

US = 1_000
TRANSFER_NS = 60 * US


@dataclass
class Rank:
    """One rank of a job, as its program sees it.

    Attributes:
        waits: how long it waits in each collective, by the group and the number of the collective in the group.
    """

    number: int
    waits: dict[tuple[str, int], int]
    machine: Machine = field(default_factory=lambda: Machine(tick_ns=US))
    met: dict[tuple[str, int], Work] = field(default_factory=dict)
    groups: dict[int, tuple[str, Sequence[int]]] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)

    @property
    def main(self) -> Host:
        return self.machine.host("main")

    @property
    def queue(self) -> Queue:
        return self.machine.queue(number=7)

    def reduce(
        self, group: str, members: Sequence[int], *, queue: Queue | None = None, transfer_ns: int = TRANSFER_NS
    ) -> Work:
        """An all-reduce with the other ranks of a group, which ends for all when the last has come and all is sent."""
        with self.main.operator("c10d::allreduce_"):
            return self._meet("ncclDevKernel_AllReduce_Sum_f32_RING_LL", group, members, queue, transfer_ns)

    def send_or_receive(self, source: int, target: int, *, transfer_ns: int = TRANSFER_NS) -> Work:
        """The part of one of two ranks in a message from one to the other."""
        with self.main.operator("c10d::send" if self.number == source else "c10d::recv_"):
            group = f"{source} to {target}"
            return self._meet("ncclDevKernel_SendRecv", group, (source, target), None, transfer_ns)

    def _meet(self, name: str, group: str, members: Sequence[int], queue: Queue | None, transfer_ns: int) -> Work:
        key = (group, self._counts[group])
        self._counts[group] += 1
        work = self.main.launch(name, queue or self.queue, transfer_ns + self.waits.get(key, 0))
        self.met[key], self.groups[work.correlation] = work, (group, members)
        return work


def job(ranks: int, program: Callable[[Rank], None]) -> list[Rank]:
    """Run a program on every rank until the waits of all fit each other."""
    waits: list[dict[tuple[str, int], int]] = [{} for _ in range(ranks)]
    while True:
        found = [Rank(number, waits[number]) for number in range(ranks)]
        for rank in found:
            program(rank)
        last: dict[tuple[str, int], int] = {}
        for rank in found:
            for key, work in rank.met.items():
                last[key] = max(last.get(key, 0), work.start_ns)
        fitting = [{key: last[key] - work.start_ns for key, work in rank.met.items()} for rank in found]
        if fitting == waits:
            return found
        waits = fitting


def write_job(folder: Path, ranks: list[Rank]) -> None:
    """Write the traces of these ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        trace = json.loads(kineto_bytes(rank.machine))
        trace["distributedInfo"] = {"backend": "nccl", "rank": rank.number, "world_size": len(ranks)}
        for event in trace["traceEvents"]:
            args = event.get("args", {})
            if "Process Group Name" in args:
                group, members = rank.groups[args["correlation"]]
                listed = f"[{', '.join(map(str, members))}]"
                args |= {"Process Group Name": group, "Group size": len(members), "Process Group Ranks": listed}
                if " to " in group:
                    source, target = members
                    is_sent = rank.number == source
                    args |= {"Process Group Name": "pipeline", "Collective name": "send" if is_sent else "recv"}
                    args |= {"Dst Rank": target} if is_sent else {"Src Rank": source}
        (folder / f"rank{rank.number}.json").write_text(json.dumps(trace))
