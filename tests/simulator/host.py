"""A host thread as a program sees it: the calls of a training script, each taking simulated time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.simulator.device import COMMUNICATION, COMPUTE, COPY, SET, Event, Launch, Ledger, Queue, Work
from tests.simulator.timeline import (
    ANNOTATION,
    CALL,
    DATA_LOADER_PREFIX,
    DRIVER_CALL,
    FRAME,
    OPERATOR,
    OPTIMIZER_PREFIX,
    STEP_PREFIX,
    Timeline,
)

CALL_NS = 4_000
LATENCY_NS = 6_000
OPERATOR_NS = 2_000
COPY_NS = 3_000
COMPILE_FRAME = "torch/_dynamo/convert_frame.py(100): compile"


@dataclass(eq=False)
class Host(Timeline):
    """A host thread. The first thread of a machine is its main thread, the only one that carries steps."""

    ledger: Ledger = field(kw_only=True)
    is_main: bool = field(default=False, kw_only=True)

    # Slices

    @contextmanager
    def slice(self, category: str, name: str, *, before_ns: int = 0, after_ns: int = 0) -> Iterator[None]:
        """A slice that spends ``before_ns`` ahead of its body and ``after_ns`` behind it."""
        self.open(category, name)
        self.work(before_ns)
        yield
        self.work(after_ns)
        self.close()

    @contextmanager
    def operator(
        self,
        name: str,
        *shapes: tuple[int, ...],
        before_ns: int = 0,
        after_ns: int = 0,
        kind: str = "float",
    ) -> Iterator[None]:
        """An operator; with ``shapes`` one whose inputs, all of one number type, the profiler wrote down."""
        with self.slice(OPERATOR, name, before_ns=before_ns, after_ns=after_ns):
            if shapes:
                self.stack[-1].shapes, self.stack[-1].types = shapes, (kind,) * len(shapes)
            yield

    @contextmanager
    def frame(self, name: str, *, before_ns: int = 0, after_ns: int = 0) -> Iterator[None]:
        """A Python function, named ``file.py(LINE): function``; not recorded when the machine has no frames."""
        if self.ledger.with_frames:
            with self.slice(FRAME, name, before_ns=before_ns, after_ns=after_ns):
                yield
        else:
            self.work(before_ns)
            yield
            self.work(after_ns)

    @contextmanager
    def annotation(self, name: str) -> Iterator[None]:
        if name.startswith(STEP_PREFIX) and not self.is_main:
            raise ValueError("steps stand on the main thread")
        with self.slice(ANNOTATION, name):
            yield

    @contextmanager
    def step(self, index: int) -> Iterator[None]:
        with self.annotation(f"{STEP_PREFIX}{index}"):
            yield

    @contextmanager
    def optimizer_step(self, name: str = "AdamW") -> Iterator[None]:
        with self.annotation(f"{OPTIMIZER_PREFIX}{name}.step"):
            yield

    # Host work

    def data_loader(self, duration_ns: int, *, workers: bool = False) -> None:
        """Wait for a batch."""
        iterator = "_MultiProcessingDataLoaderIter" if workers else "_SingleProcessDataLoaderIter"
        with self.slice(ANNOTATION, f"{DATA_LOADER_PREFIX}#{iterator}.__next__", before_ns=duration_ns):
            pass

    def garbage_collection(self, duration_ns: int) -> None:
        """Collect garbage: no slice says so, the time goes to whatever slice is innermost."""
        self.work(duration_ns)

    def compile(self, duration_ns: int) -> None:
        """Compile a graph; without frames nothing in the trace says so."""
        with self.frame(COMPILE_FRAME, before_ns=duration_ns):
            pass

    def profiler_flush(self, duration_ns: int) -> None:
        """The profiler stops this thread for its own business."""
        self.ledger.overheads.append((self.now_ns, self.now_ns + duration_ns))
        self.work(duration_ns)

    def allocate(self, duration_ns: int) -> None:
        self._plain_call("cudaMalloc", duration_ns)

    def free(self, duration_ns: int) -> None:
        self._plain_call("cudaFree", duration_ns)

    def hand_over(self, other: Timeline) -> None:
        """Wake another thread: whatever it does next happens after now."""
        other.wait_until(self.now_ns)

    def wait_for(self, other: Timeline) -> None:
        """Wait, in whatever slice is innermost, until the other thread got as far as it is now."""
        self.wait_until(other.now_ns)

    # Device work

    def launch(
        self,
        kernel_name: str,
        queue: Queue,
        duration_ns: int,
        call_ns: int = CALL_NS,
        latency_ns: int = LATENCY_NS,
        *,
        driver: bool = False,
    ) -> Work:
        """Launch a kernel, which starts no earlier than ``latency_ns`` after the call started."""
        category, call_name = (DRIVER_CALL, "cuLaunchKernel") if driver else (CALL, "cudaLaunchKernel")
        kernels = [(kernel_name, queue, duration_ns)]
        return self._launch(category, call_name, kernels, call_ns, latency_ns)[0]

    def graph_launch(
        self, kernels: Sequence[tuple[str, Queue, int]], call_ns: int = CALL_NS, latency_ns: int = LATENCY_NS
    ) -> list[Work]:
        """Launch a recorded graph of (kernel name, queue, duration_ns): one call, one correlation, many kernels."""
        return self._launch(CALL, "cudaGraphLaunch", kernels, call_ns, latency_ns)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture a graph: what `captured_launch` calls inside becomes its kernels, and no device works."""
        self._plain_call("cudaStreamBeginCapture", CALL_NS)
        yield
        self._plain_call("cudaStreamEndCapture", CALL_NS)

    def captured_launch(self, kernel_name: str, *, is_named: bool = True) -> None:
        """Launch a kernel while a graph is captured; `is_named` if the profiler writes which one."""
        call = self.open(CALL, "cudaLaunchKernel", correlation=next(self.ledger.correlations))
        call.kernel = kernel_name if is_named else None
        self._end_call(CALL_NS)

    def memset(
        self,
        queue: Queue,
        byte_count: int = 512,
        *,
        duration_ns: int = 1_000,
        call_ns: int = CALL_NS,
        latency_ns: int = LATENCY_NS,
    ) -> Work:
        return self._transfer(
            "cudaMemsetAsync", SET, "Memset (Device)", queue, byte_count, duration_ns, call_ns, latency_ns
        )

    def copy_to_device(
        self,
        byte_count: int,
        queue: Queue,
        *,
        duration_ns: int = COPY_NS,
        pageable: bool = True,
        operator_ns: int = OPERATOR_NS,
        call_ns: int = CALL_NS,
        latency_ns: int = LATENCY_NS,
    ) -> Work:
        """``tensor.to(device)``: from pageable memory the host waits for the copy."""
        memory = "Pageable" if pageable else "Pinned"
        with self._copying(operator_ns):
            work = self._copy(
                f"HtoD ({memory} -> Device)",
                queue,
                byte_count,
                duration_ns,
                call_ns,
                latency_ns,
                cause="host_to_device_copy",
            )
            if pageable:
                self.synchronize_queue(queue, call_ns=call_ns, cause="host_to_device_copy")
        return work

    def copy_to_host(
        self,
        byte_count: int,
        queue: Queue,
        *,
        duration_ns: int = COPY_NS,
        pageable: bool = True,
        operator_ns: int = OPERATOR_NS,
        call_ns: int = CALL_NS,
        latency_ns: int = LATENCY_NS,
    ) -> Work:
        """``tensor.cpu()``: to pageable memory the host waits for the copy."""
        memory = "Pageable" if pageable else "Pinned"
        with self._copying(operator_ns):
            work = self._copy(
                f"DtoH (Device -> {memory})",
                queue,
                byte_count,
                duration_ns,
                call_ns,
                latency_ns,
                cause="synchronisation",
            )
            if pageable:
                self.synchronize_queue(queue, call_ns=call_ns)
        return work

    def copy_on_device(
        self,
        byte_count: int,
        queue: Queue,
        *,
        duration_ns: int = COPY_NS,
        operator_ns: int = OPERATOR_NS,
        call_ns: int = CALL_NS,
        latency_ns: int = LATENCY_NS,
    ) -> Work:
        """``target.copy_(source)`` within a device: the host goes on, nothing but dispatch."""
        with self.operator("aten::copy_", before_ns=operator_ns, after_ns=operator_ns):
            return self._copy("DtoD (Device -> Device)", queue, byte_count, duration_ns, call_ns, latency_ns)

    def item(
        self,
        queue: Queue,
        *,
        duration_ns: int = 1_000,
        operator_ns: int = OPERATOR_NS,
        call_ns: int = CALL_NS,
        latency_ns: int = LATENCY_NS,
    ) -> Work:
        """``tensor.item()``: copy one number to the host and wait for it."""
        with (
            self.operator("aten::item", before_ns=operator_ns, after_ns=operator_ns),
            self.operator("aten::_local_scalar_dense", before_ns=operator_ns, after_ns=operator_ns),
        ):
            work = self._copy(
                "DtoH (Device -> Pageable)", queue, 4, duration_ns, call_ns, latency_ns, cause="synchronisation"
            )
            self.synchronize_queue(queue, call_ns=call_ns)
        return work

    # Events and waiting

    def record_event(self, queue: Queue, *, call_ns: int = CALL_NS) -> Event:
        """Mark the place a queue is at: reached when all work it has now is done."""
        event = Event(queue.device, queue.number, max(queue.end_ns, self.now_ns))
        self._plain_call("cudaEventRecord", call_ns, queue)
        return event

    def wait_event(self, queue: Queue, event: Event, *, call_ns: int = CALL_NS, latency_ns: int = 0) -> None:
        """Make a queue wait for an event, which it sees ``latency_ns`` late; the host goes on."""
        queue.blocked_until_ns = max(queue.blocked_until_ns, event.time_ns + latency_ns)
        self._plain_call("cudaStreamWaitEvent", call_ns, queue)

    def synchronize_event(self, event: Event, *, call_ns: int = CALL_NS, return_ns: int = 0) -> None:
        self._wait("cudaEventSynchronize", event.time_ns + return_ns, call_ns, event.device)

    def synchronize_queue(
        self, queue: Queue, *, call_ns: int = CALL_NS, return_ns: int = 0, cause: str | None = None
    ) -> None:
        """Wait until a queue is empty; the call returns ``return_ns`` after that and lasts ``call_ns`` at least."""
        ready_ns = queue.end_ns + return_ns
        self._wait("cudaStreamSynchronize", ready_ns, call_ns, queue.device, queue.number, cause=cause)

    def synchronize_device(self, device: int = 0, *, call_ns: int = CALL_NS, return_ns: int = 0) -> None:
        end_ns = max((queue.end_ns for queue in self.ledger.queues_of(device)), default=0)
        self._wait("cudaDeviceSynchronize", end_ns + return_ns, call_ns, device)

    # Helpers

    def _launch(
        self, category: str, call_name: str, kernels: Sequence[tuple[str, Queue, int]], call_ns: int, latency_ns: int
    ) -> list[Work]:
        launch = self._start_call(category, call_name, [queue for _, queue, _ in kernels])
        ready_ns = launch.start_ns + latency_ns
        works = [
            self.ledger.run(
                queue, COMMUNICATION if name.startswith("nccl") else COMPUTE, name, ready_ns, duration_ns, launch
            )
            for name, queue, duration_ns in kernels
        ]
        self._end_call(call_ns)
        return works

    def _copy(
        self,
        direction: str,
        queue: Queue,
        byte_count: int,
        duration_ns: int,
        call_ns: int,
        latency_ns: int,
        *,
        cause: str | None = None,
    ) -> Work:
        name = f"Memcpy {direction}"
        return self._transfer(
            "cudaMemcpyAsync", COPY, name, queue, byte_count, duration_ns, call_ns, latency_ns, cause=cause
        )

    def _transfer(
        self,
        call_name: str,
        kind: str,
        name: str,
        queue: Queue,
        byte_count: int,
        duration_ns: int,
        call_ns: int,
        latency_ns: int,
        *,
        cause: str | None = None,
    ) -> Work:
        launch = self._start_call(CALL, call_name, [queue], cause=cause)
        work = self.ledger.run(queue, kind, name, launch.start_ns + latency_ns, duration_ns, launch, byte_count)
        self._end_call(call_ns)
        return work

    @contextmanager
    def _copying(self, operator_ns: int) -> Iterator[None]:
        """The operators PyTorch runs for ``tensor.to``."""
        with (
            self.operator("aten::to", before_ns=operator_ns),
            self.operator("aten::_to_copy", before_ns=operator_ns),
            self.operator("aten::copy_", before_ns=operator_ns, after_ns=operator_ns),
        ):
            yield

    def _start_call(self, category: str, name: str, queues: Sequence[Queue], *, cause: str | None = None) -> Launch:
        """Open a launching call; a queue takes calls in the order of their starts, so an early thread waits."""
        self.wait_until(max((queue.last_call_ns for queue in queues), default=0))
        correlation = next(self.ledger.correlations)
        call = self.open(category, name, cause=cause, correlation=correlation)
        for queue in queues:
            queue.last_call_ns = call.start_ns
        return Launch(self, call, correlation)

    def _end_call(self, call_ns: int) -> None:
        self.work(call_ns)
        self.close()

    def _plain_call(self, name: str, call_ns: int, queue: Queue | None = None) -> None:
        call = self.open(CALL, name, correlation=next(self.ledger.correlations))
        if queue is not None:
            call.device, call.queue = queue.device, queue.number
        self._end_call(call_ns)

    def _wait(
        self, name: str, ready_ns: int, call_ns: int, device: int, queue: int | None = None, *, cause: str | None = None
    ) -> None:
        call = self.open(CALL, name, cause=cause, correlation=next(self.ledger.correlations))
        call.device, call.queue = device, queue
        self.work(call_ns)
        self.wait_until(ready_ns)
        self.close()
