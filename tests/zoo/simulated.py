"""What a processor cannot show: trainings on a simulated device, each with a clean twin.

Some are built here; the others stand among the simulator's own programs. The truth needs no timing: the gain is the
difference of the two machines' steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.simulator import Machine, write_kineto
from tests.simulator.device import Queue
from tests.simulator.host import Host
from tests.simulator.programs import PROGRAMS
from tests.simulator.timeline import STEP_PREFIX

US: Final = 1_000
STEPS: Final = 5
LAYERS: Final = 8
BACKWARD: Final = "autograd::engine::evaluate_function: AddmmBackward0"
STEP_FRAME: Final = "train.py(12): step"


@dataclass(frozen=True)
class Simulated:
    """A training on a simulated device.

    Attributes:
        name: of the program.
        rule: identifier of the rule that should find its fault first.
        fault, clean: make a machine and run either twin on it.
    """

    name: str
    rule: str
    fault: Callable[[], Machine]
    clean: Callable[[], Machine]

    def machine(self, twin: str) -> Machine:
        """The "fault" or the "clean" one, after its run."""
        return self.fault() if twin == "fault" else self.clean()

    def write(self, twin: str, folder: Path) -> Path:
        """Write a twin's trace."""
        return write_kineto(self.machine(twin), folder / f"{self.name}-{twin}.json.gz")

    def step_ns(self, twin: str) -> float:
        """A step (or an engine's iteration): from the first event until host and devices are done, over the steps."""
        machine = self.machine(twin)
        ends = [host.now_ns for host in machine.hosts] + [work.end_ns for work in machine.works]
        steps = sum(one.name.startswith((STEP_PREFIX, "execute_context_")) for one in machine.main.slices)
        return (max(ends) - machine.first_event_ns()) / steps


def _own(rule: str, build: Callable[[bool], Machine]) -> Simulated:
    """A program of this module, which is told whether its fault is planted."""
    return Simulated(build.__name__, rule, lambda: build(True), lambda: build(False))


def _of_the_simulator(rule: str, name: str, clean: str | None = None) -> Simulated:
    """One of the simulator's programs, NAME_fault, beside NAME_clean or another."""
    return Simulated(name, rule, PROGRAMS[f"{name}_fault"], PROGRAMS[clean or f"{name}_clean"])


def _forward(main: Host, queue: Queue, kernel_us: int, layers: int = LAYERS) -> None:
    with main.frame("model.py(30): forward", before_ns=5 * US):
        for index in range(layers):
            with (
                main.frame(f"nn.Module: Linear_{index}", before_ns=3 * US),
                main.operator("aten::linear", before_ns=3 * US),
                main.operator("aten::addmm", before_ns=6 * US),
            ):
                main.launch("gemm", queue, kernel_us * US)


def _backward(main: Host, queue: Queue, kernel_us: int, layers: int = LAYERS) -> None:
    for _ in range(layers):
        with main.operator(BACKWARD, before_ns=4 * US), main.operator("aten::mm", before_ns=6 * US):
            main.launch("gemm_backward", queue, 2 * kernel_us * US)


def _update(main: Host, queue: Queue, kernels: int, kernel_us: int) -> None:
    with main.frame("torch/optim/optimizer.py(484): wrapper", before_ns=4 * US), main.optimizer_step():
        for _ in range(kernels):
            with main.operator("aten::_fused_adamw_" if kernels == 1 else "aten::add_", before_ns=10 * US):
                main.launch("update", queue, kernel_us * US)


def _training(body: Callable[[Host, Queue, Machine], None]) -> Machine:
    """A machine after STEPS steps of `body`."""
    machine = Machine(tick_ns=US)
    main, queue = machine.host("main"), machine.queue()
    for index in range(STEPS):
        with main.step(index), main.frame(STEP_FRAME, before_ns=3 * US):
            body(main, queue, machine)
    return machine


def device_waits_for_batches(fault: bool) -> Machine:
    """Batches are loaded in the training process, or by workers ahead of time."""

    def body(main: Host, queue: Queue, _: Machine) -> None:
        main.data_loader(9_000 * US if fault else 60 * US, workers=not fault)
        main.copy_to_device(1 << 20, queue, duration_ns=40 * US, pageable=False)
        _forward(main, queue, 200)
        _backward(main, queue, 200)
        _update(main, queue, 1, 100)

    return _training(body)


def loss_read_in_every_layer(fault: bool) -> Machine:
    """A number is read from the device after each layer, or never."""

    def body(main: Host, queue: Queue, _: Machine) -> None:
        for _ in range(LAYERS):
            _forward(main, queue, 60, layers=2)
            if fault:
                main.item(queue)
                main.work(50 * US)
        _backward(main, queue, 40, layers=2 * LAYERS)
        _update(main, queue, 1, 60)

    return _training(body)


def kernels_shorter_than_launches(fault: bool) -> Machine:
    """Kernels of a few microseconds, launched one by one or as a recorded graph."""

    def body(main: Host, queue: Queue, _: Machine) -> None:
        if fault:
            _forward(main, queue, 3, layers=60)
            _backward(main, queue, 3, layers=60)
        else:
            kernels = [("gemm", queue, 3 * US)] * 60 + [("gemm_backward", queue, 6 * US)] * 60
            main.graph_launch(kernels, call_ns=30 * US)
        _update(main, queue, 1, 20)

    return _training(body)


def copies_from_pageable_memory(fault: bool) -> Machine:
    """Batches are copied to the device while it waits, or beside its work from pinned memory."""

    def body(main: Host, queue: Queue, machine: Machine) -> None:
        main.data_loader(50 * US, workers=True)
        if fault:
            main.copy_to_device(64 << 20, queue, duration_ns=2_000 * US)
        else:
            main.copy_to_device(64 << 20, machine.queue(number=20), duration_ns=2_000 * US, pageable=False)
        _forward(main, queue, 150)
        _backward(main, queue, 150)
        _update(main, queue, 1, 80)

    return _training(body)


def gradients_reduced_at_the_end(fault: bool) -> Machine:
    """Gradients are exchanged after the backward pass, or while it goes on."""

    def exchange(main: Host, queue: Queue, machine: Machine, us: int) -> None:
        other = machine.queue(number=24)
        main.wait_event(other, main.record_event(queue))
        with main.operator("c10d::allreduce_", before_ns=8 * US):
            main.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL", other, us * US)
        if fault or us == 100:
            main.wait_event(queue, main.record_event(other))

    def body(main: Host, queue: Queue, machine: Machine) -> None:
        _forward(main, queue, 150)
        for part in range(4):
            _backward(main, queue, 150, layers=2)
            if not fault:
                exchange(main, queue, machine, 100 if part == 3 else 400)
        if fault:
            exchange(main, queue, machine, 1_300)
        _update(main, queue, 1, 100)

    return _training(body)


def compiled_in_every_step(fault: bool) -> Machine:
    """Every step meets a new shape and compiles, or none does."""

    def body(main: Host, queue: Queue, _: Machine) -> None:
        if fault:
            main.compile(5_000 * US)
        for _ in range(LAYERS):
            main.launch("triton_fused", queue, 300 * US, driver=True)
        _update(main, queue, 1, 100)

    return _training(body)


def parameters_updated_one_by_one(fault: bool) -> Machine:
    """The optimizer launches kernels for each parameter, or one for all."""

    def body(main: Host, queue: Queue, _: Machine) -> None:
        _forward(main, queue, 60)
        _backward(main, queue, 60)
        _update(main, queue, 120 if fault else 1, 2 if fault else 40)

    return _training(body)


def synchronised_after_every_layer(fault: bool) -> Machine:
    """torch.cuda.synchronize() after every layer, left over from timing, or nowhere."""

    def body(main: Host, queue: Queue, _: Machine) -> None:
        for _ in range(LAYERS):
            _forward(main, queue, 40, layers=1)
            if fault:
                main.synchronize_device()
                main.work(20 * US)
        _backward(main, queue, 40)
        _update(main, queue, 1, 60)

    return _training(body)


SIMULATED: Final = (
    _own("input-bound", device_waits_for_batches),
    _own("host-synchronisation", loss_read_in_every_layer),
    _own("host-synchronisation", synchronised_after_every_layer),
    _own("launch-bound", kernels_shorter_than_launches),
    _own("exposed-copy", copies_from_pageable_memory),
    _own("exposed-communication", gradients_reduced_at_the_end),
    _own("recompilation", compiled_in_every_step),
    _own("single-tensor-optimizer", parameters_updated_one_by_one),
    _of_the_simulator("input-bound", "starved_loader"),
    _of_the_simulator("host-synchronisation", "item", "host_ahead_clean"),
    _of_the_simulator("host-synchronisation", "print_tensor", "host_ahead_clean"),
    _of_the_simulator("host-synchronisation", "boolean_indexing", "host_ahead_clean"),
    _of_the_simulator("host-synchronisation", "nonzero", "host_ahead_clean"),
    _of_the_simulator("host-synchronisation", "device_synchronize", "host_ahead_clean"),
    _of_the_simulator("host-synchronisation", "item_before_optimizer", "host_ahead_clean"),
    _of_the_simulator("host-synchronisation", "copy_to_host"),
    _of_the_simulator("exposed-copy", "pageable_copy"),
    _of_the_simulator("frequent-logging", "progress_bar", "host_ahead_clean"),
    _of_the_simulator("host-created-tensor", "host_created_tensor"),
    _of_the_simulator("device-ping-pong", "device_ping_pong"),
    _of_the_simulator("cpu-fallback", "cpu_fallback"),
    _of_the_simulator("late-first-launch", "late_first_launch"),
    _of_the_simulator("device-tail", "device_tail"),
    _of_the_simulator("gradient-clipping", "gradient_clipping"),
    _of_the_simulator("layout-conversion", "layout_conversion"),
    _of_the_simulator("unaligned-dimensions", "unaligned_vocabulary"),
    _of_the_simulator("unfused-attention", "written_out_attention"),
    _of_the_simulator("small-buckets", "small_reductions"),
    _of_the_simulator("late-rank", "late_rank"),
    _of_the_simulator("data-parallel", "replicated_model"),
    _of_the_simulator("wrong-backend", "exchange_through_host"),
    _of_the_simulator("gradient-copies", "gradient_copies"),
    _of_the_simulator("decode-graphs", "decode_graphs"),
    _of_the_simulator("decode-graphs", "missed_graphs"),
    _of_the_simulator("between-iterations", "between_iterations"),
    _of_the_simulator("rejected-drafts", "rejected_drafts"),
    _of_the_simulator("decode-graphs", "padded_graphs"),
    _of_the_simulator("exposed-communication", "tensor_parallel"),
)
