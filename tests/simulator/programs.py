"""Ready-made programs, each slow for one known reason. All their times are whole microseconds."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulator.device import Queue
from tests.simulator.device_faults import DEVICE_FAULTS
from tests.simulator.host import Host
from tests.simulator.machine import Machine
from tests.simulator.parallel_faults import PARALLEL_FAULTS
from tests.simulator.serving_faults import SERVING_FAULTS

US = 1_000
STEP_FRAME = "train.py(12): step"
MODEL_FRAME = "model.py(30): forward"
BACKWARD_NODE = "autograd::engine::evaluate_function: AddmmBackward0"
LAYERS = 6


def _machine() -> tuple[Machine, Host, Queue]:
    machine = Machine(tick_ns=US)
    return machine, machine.host("main"), machine.queue()


def _layers(host: Host, queue: Queue, *, kernel_us: int, python_us: int = 5, layers: int = LAYERS) -> None:
    """A model's forward pass: one matrix product a layer."""
    with host.frame(MODEL_FRAME, before_ns=python_us * US):
        for index in range(layers):
            with (
                host.frame(f"nn.Module: Linear_{index}", before_ns=python_us * US),
                host.operator("aten::linear", before_ns=5 * US),
                host.operator("aten::addmm", before_ns=8 * US),
            ):
                host.launch("gemm", queue, kernel_us * US)


def _optimizer(host: Host, queue: Queue, *, kernels: int = 1, kernel_us: int = 40) -> None:
    with host.frame("torch/optim/optimizer.py(484): wrapper", before_ns=4 * US), host.optimizer_step():
        for _ in range(kernels):
            with host.operator("aten::add_", before_ns=12 * US):
                host.launch("elementwise", queue, kernel_us * US)


def input_bound_training(steps: int = 4) -> Machine:
    """The host loads every batch itself, and the device waits for it."""
    machine, main, queue = _machine()
    for index in range(steps):
        with main.step(index), main.frame(STEP_FRAME, before_ns=3 * US):
            main.data_loader(5_000 * US)
            main.copy_to_device(1 << 20, queue, duration_ns=80 * US)
            _layers(main, queue, kernel_us=200)
            _optimizer(main, queue)
    return machine


def launch_bound_training(steps: int = 4) -> Machine:
    """Kernels shorter than what it takes to launch them."""
    machine, main, queue = _machine()
    for index in range(steps):
        with main.step(index), main.frame(STEP_FRAME, before_ns=3 * US):
            _layers(main, queue, kernel_us=2, python_us=1, layers=40)
    return machine


def item_every_step(steps: int = 4) -> Machine:
    """``loss.item()`` after every step: the host waits, then has to refill the queue."""
    machine, main, queue = _machine()
    for index in range(steps):
        with main.step(index), main.frame(STEP_FRAME, before_ns=3 * US):
            _layers(main, queue, kernel_us=150)
            main.item(queue)
            main.work(20 * US)
    return machine


def two_queue_dependency(rounds: int = 4) -> Machine:
    """Work hops between two queues; each hop leaves the device idle although everything was launched long ago."""
    machine, main, first = _machine()
    second = machine.queue(number=20)
    with main.frame(STEP_FRAME), main.operator("aten::first", before_ns=2 * US):
        main.launch("long", first, 900 * US)
        for _ in range(rounds):
            for source, target in ((first, second), (second, first)):
                main.wait_event(target, main.record_event(source), latency_ns=6 * US)
                main.launch("hop", target, 30 * US)
    return machine


def graph_decode(tokens: int = 8, kernels: int = 20) -> Machine:
    """Decoding with one recorded graph a token, sampled on the host."""
    machine, main, queue = _machine()
    graph = [(f"decode_{index}", queue, 5 * US) for index in range(kernels)]
    for index in range(tokens):
        with main.step(index), main.frame("generate.py(40): decode", before_ns=6 * US):
            main.graph_launch(graph, call_ns=12 * US)
            main.item(queue)
            main.work(30 * US)
    return machine


def two_devices(steps: int = 4) -> Machine:
    """A pipeline of two devices: while one works the other waits for its input."""
    machine, main, first = _machine()
    second = machine.queue(device=1)
    for index in range(steps):
        with main.step(index), main.frame(STEP_FRAME, before_ns=3 * US):
            _layers(main, first, kernel_us=100)
            main.wait_event(second, main.record_event(first))
            _layers(main, second, kernel_us=100)
            main.synchronize_device(1)
    return machine


def backward_thread(steps: int = 4) -> Machine:
    """The backward pass is launched by a thread of its own, while the main thread waits for it."""
    machine, main, queue = _machine()
    backward = machine.host("backward")
    for index in range(steps):
        with main.step(index), main.frame(STEP_FRAME, before_ns=3 * US):
            _layers(main, queue, kernel_us=10)
            with main.frame("torch/_tensor.py(570): backward", before_ns=8 * US):
                main.hand_over(backward)
                for _ in range(LAYERS):
                    with (
                        backward.operator(BACKWARD_NODE, before_ns=12 * US, after_ns=3 * US),
                        backward.operator("aten::mm", before_ns=8 * US),
                    ):
                        backward.launch("gemm_backward", queue, 12 * US)
                    backward.work(3 * US)
                main.wait_for(backward)
            _optimizer(main, queue)
    return machine


def exposed_all_reduce(steps: int = 4) -> Machine:
    """Gradients are reduced on a queue of their own, and the optimizer has to wait for the tail."""
    machine, main, compute = _machine()
    communication = machine.queue(number=24)
    for index in range(steps):
        with main.step(index), main.frame(STEP_FRAME, before_ns=3 * US):
            _layers(main, compute, kernel_us=120)
            main.wait_event(communication, main.record_event(compute))
            with main.operator("c10d::allreduce_", before_ns=8 * US):
                main.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL", communication, 500 * US)
            main.launch("overlapped", compute, 200 * US)
            main.wait_event(compute, main.record_event(communication))
            _optimizer(main, compute)
    return machine


def recompilation(steps: int = 4) -> Machine:
    """Every step meets a new shape and is compiled anew."""
    machine, main, queue = _machine()
    for index in range(steps):
        with main.step(index), main.frame(STEP_FRAME, before_ns=3 * US):
            main.compile(20_000 * US)
            for _ in range(LAYERS):
                main.launch("triton_fused", queue, 100 * US, driver=True)
    return machine


def single_tensor_optimizer(steps: int = 4, parameters: int = 60) -> Machine:
    """An optimizer that updates parameter after parameter, a small kernel each."""
    machine, main, queue = _machine()
    for index in range(steps):
        with main.step(index), main.frame(STEP_FRAME, before_ns=3 * US):
            _layers(main, queue, kernel_us=60)
            _optimizer(main, queue, kernels=parameters, kernel_us=2)
    return machine


def _training(
    before: Callable[[Host, Queue], None] | None = None,
    after_backward: Callable[[Host, Queue], None] | None = None,
    after: Callable[[Host, Queue], None] | None = None,
    steps: int = 6,
) -> Machine:
    """Steps that a device needs twice as long for as the host, which runs ahead unless something stops it."""
    machine, main, queue = _machine()
    for index in range(steps):
        with main.step(index), main.frame(STEP_FRAME, before_ns=3 * US):
            if before is not None:
                before(main, queue)
            _layers(main, queue, kernel_us=40)
            for _ in range(LAYERS):
                with main.operator(BACKWARD_NODE, before_ns=12 * US), main.operator("aten::mm", before_ns=8 * US):
                    main.launch("gemm_backward", queue, 60 * US)
            if after_backward is not None:
                after_backward(main, queue)
            _optimizer(main, queue)
            if after is not None:
                after(main, queue)
    return machine


def _item(host: Host, queue: Queue) -> None:
    with host.frame("train.py(40): read", before_ns=2 * US):
        host.item(queue)


def _print_tensor(host: Host, queue: Queue) -> None:
    with host.operator("stepscope.logging#print", before_ns=10 * US, after_ns=25 * US):
        host.item(queue)


def _print(host: Host, queue: Queue) -> None:
    with host.operator("stepscope.logging#print", before_ns=400 * US):
        pass


def _progress_bar(host: Host, queue: Queue) -> None:
    with host.operator("stepscope.logging#tqdm", before_ns=500 * US):
        pass


def _mask(host: Host, queue: Queue) -> None:
    with host.operator("aten::index", before_ns=4 * US), host.operator("aten::nonzero", before_ns=4 * US):
        host.synchronize_queue(queue)


def _nonzero(host: Host, queue: Queue) -> None:
    with host.operator("aten::nonzero", before_ns=4 * US):
        host.synchronize_queue(queue)


def _to_host(host: Host, queue: Queue) -> None:
    host.copy_to_host(1 << 16, queue, duration_ns=20 * US)


def _to_host_pinned(host: Host, queue: Queue) -> None:
    host.copy_to_host(1 << 16, queue, duration_ns=20 * US, pageable=False)


def _from_pageable(host: Host, queue: Queue) -> None:
    host.copy_to_device(1 << 22, queue, duration_ns=300 * US)


def _from_pinned(host: Host, queue: Queue) -> None:
    host.copy_to_device(1 << 22, queue, duration_ns=8 * US, pageable=False)


def _wait_for_device(host: Host, queue: Queue) -> None:
    host.synchronize_device()


def _wait_for_queue(host: Host, queue: Queue) -> None:
    host.synchronize_queue(queue)


def _quick_loader(host: Host, queue: Queue) -> None:
    host.data_loader(20 * US, workers=True)


def _starved_loader(host: Host, queue: Queue) -> None:
    host.data_loader(900 * US, workers=True)


PROGRAMS: dict[str, Callable[[], Machine]] = {
    "input_bound_training": input_bound_training,
    "launch_bound_training": launch_bound_training,
    "item_every_step": item_every_step,
    "two_queue_dependency": two_queue_dependency,
    "graph_decode": graph_decode,
    "two_devices": two_devices,
    "backward_thread": backward_thread,
    "exposed_all_reduce": exposed_all_reduce,
    "recompilation": recompilation,
    "single_tensor_optimizer": single_tensor_optimizer,
    # What one call a step costs a program that is fine without it.
    "host_ahead_clean": _training,
    "item_fault": lambda: _training(after=_item),
    "print_tensor_fault": lambda: _training(after=_print_tensor),
    "print_fault": lambda: _training(after=_print),
    "progress_bar_fault": lambda: _training(after=_progress_bar),
    "boolean_indexing_fault": lambda: _training(before=_mask),
    "nonzero_fault": lambda: _training(before=_nonzero),
    "device_synchronize_fault": lambda: _training(after=_wait_for_device),
    "queue_synchronize_fault": lambda: _training(after=_wait_for_queue),
    "copy_to_host_fault": lambda: _training(after=_to_host),
    "copy_to_host_clean": lambda: _training(after=_to_host_pinned),
    "pageable_copy_fault": lambda: _training(before=_from_pageable),
    "pageable_copy_clean": lambda: _training(before=_from_pinned),
    "item_before_optimizer_fault": lambda: _training(after_backward=_item),
    "starved_loader_fault": lambda: _training(before=_starved_loader),
    "starved_loader_clean": lambda: _training(before=_quick_loader),
    **DEVICE_FAULTS,
    **PARALLEL_FAULTS,
    **SERVING_FAULTS,
}
