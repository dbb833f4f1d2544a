"""A simulated machine: host threads, devices with queues, and the truth about why the devices were idle."""

from __future__ import annotations

from tests.simulator.device import COMMUNICATION, COMPUTE, Ledger, Queue, Work
from tests.simulator.host import Host
from tests.simulator.truth import Truth, tell_truth

PROCESS_ID = 4242


class Machine:
    """Host threads and devices, driven like a script.

        machine = Machine()
        main, queue = machine.host("main"), machine.queue()
        with main.step(1), main.frame("train.py(12): step"):
            main.data_loader(40_000)
            with main.operator("aten::mm", before_ns=3_000):
                main.launch("gemm", queue, duration_ns=20_000)
        truth = machine.truth()

    Every thread has its own clock, which only its own calls move. A program with several threads should call the
    thread whose clock is behind, or hand over between them: work enters a queue in the order of the calls.
    ``tick_ns`` is what separates two slices that would otherwise start at once: 1000 gives whole microseconds.
    """

    def __init__(self, *, tick_ns: int = 1, with_frames: bool = True, front_end_gap_ns: int = 0) -> None:
        self.ledger = Ledger(tick_ns, with_frames)
        self.hosts: list[Host] = []
        self._front_end_gap_ns = front_end_gap_ns

    @property
    def main(self) -> Host | None:
        """The first thread made: the one whose thread id is the process id, which carries the steps."""
        return self.hosts[0] if self.hosts else None

    @property
    def works(self) -> list[Work]:
        return self.ledger.works

    def host(self, name: str) -> Host:
        """The thread of this name, made at its first mention."""
        for host in self.hosts:
            if host.name == name:
                return host
        thread_id = PROCESS_ID + len(self.hosts)
        identifiers, ledger = self.ledger.identifiers, self.ledger
        host = Host(name, thread_id, ledger.tick_ns, identifiers, ledger=ledger, is_main=not self.hosts)
        self.hosts.append(host)
        return host

    def queue(self, device: int = 0, number: int = 7) -> Queue:
        """The queue of this number on this device, made at its first mention."""
        key = (device, number)
        if key not in self.ledger.queues:
            self.ledger.queues[key] = Queue(device, number, self._front_end_gap_ns)
        return self.ledger.queues[key]

    def work_without_launch(self, kernel_name: str, queue: Queue, start_ns: int, duration_ns: int) -> Work:
        """Device work whose launch is not in the trace: it was launched before, or its record was lost."""
        kind = COMMUNICATION if kernel_name.startswith("nccl") else COMPUTE
        return self.ledger.run(queue, kind, kernel_name, start_ns, duration_ns, None)

    def truth(self) -> Truth:
        """What really happened. All slices must be closed."""
        for host in self.hosts:
            if host.stack:
                raise ValueError(f"the slice {host.stack[-1].name!r} is still open")
        return tell_truth(self.main, self.works, self.ledger.overheads)

    def first_event_ns(self) -> int:
        """The start of the earliest thing a written trace holds; 0 if it holds nothing."""
        starts = [host.slices[0].start_ns for host in self.hosts if host.slices]
        starts += [work.start_ns for work in self.works]
        starts += [start_ns for start_ns, _ in self.ledger.overheads]
        return min(starts, default=0)
