"""Programs with one fault each that only a device can show, and their clean twins. Times are whole microseconds."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulator.device import Queue
from tests.simulator.host import Host
from tests.simulator.machine import Machine

US = 1_000
STEPS = 6
LAYERS = 10

Part = Callable[[Host, Queue], None]


def _steps(middle: Part | None = None, before: Part | None = None, after: Part | None = None) -> Machine:
    """Steps that a device needs twice as long for as the host, which runs ahead unless something stops it."""
    machine = Machine(tick_ns=US)
    main, queue = machine.host("main"), machine.queue()
    for index in range(STEPS):
        with main.step(index), main.frame("train.py(12): step", before_ns=2 * US):
            if before is not None:
                before(main, queue)
            for layer in range(LAYERS):
                if layer == LAYERS // 2 and middle is not None:
                    middle(main, queue)
                with main.frame("model.py(30): forward", before_ns=2 * US), main.operator(f"aten::layer{layer}"):
                    main.launch("gemm", queue, 40 * US)
            if after is not None:
                after(main, queue)
    return machine


def _mask_on_host(host: Host, queue: Queue) -> None:
    with host.frame("model.py(50): mask", before_ns=2 * US):
        with host.operator("aten::zeros", before_ns=30 * US):
            pass
        host.copy_to_device(1 << 20, queue, duration_ns=90 * US)


def _mask_on_device(host: Host, queue: Queue) -> None:
    with host.frame("model.py(50): mask", before_ns=2 * US), host.operator("aten::zeros", before_ns=6 * US):
        host.launch("fill", queue, 3 * US)


def _there_and_back(host: Host, queue: Queue) -> None:
    with host.frame("model.py(60): keep", before_ns=2 * US):
        host.copy_to_host(1 << 20, queue, duration_ns=90 * US)
        host.copy_to_device(1 << 20, queue, duration_ns=90 * US)


def _kept(host: Host, queue: Queue) -> None:
    with host.frame("model.py(60): keep", before_ns=2 * US):
        pass


def _sorted_on_host(host: Host, queue: Queue) -> None:
    with host.frame("model.py(70): choose", before_ns=2 * US):
        host.copy_to_host(1 << 18, queue, duration_ns=30 * US)
        with host.operator("aten::sort", before_ns=200 * US):
            pass
        host.copy_to_device(1 << 16, queue, duration_ns=20 * US)


def _sorted_on_device(host: Host, queue: Queue) -> None:
    with host.frame("model.py(70): choose", before_ns=2 * US), host.operator("aten::sort", before_ns=6 * US):
        host.launch("sort", queue, 20 * US)


def _prepare(host: Host, queue: Queue) -> None:
    with host.frame("train.py(80): prepare", before_ns=700 * US):
        pass


def _prepared(host: Host, queue: Queue) -> None:
    with host.frame("train.py(80): prepare", before_ns=20 * US):
        pass


def _results_to_host(host: Host, queue: Queue) -> None:
    with host.frame("train.py(90): collect", before_ns=2 * US):
        host.copy_to_host(1 << 24, queue, duration_ns=250 * US)


def _clip_one_by_one(host: Host, queue: Queue) -> None:
    with host.frame("train.py(95): clip", before_ns=2 * US):
        for _ in range(40):
            with host.operator("aten::linalg_vector_norm", before_ns=6 * US):
                host.launch("norm", queue, 2 * US)
        for _ in range(40):
            with host.operator("aten::mul_", before_ns=6 * US):
                host.launch("mul", queue, 2 * US)


def _clip_at_once(host: Host, queue: Queue) -> None:
    with host.frame("train.py(95): clip", before_ns=2 * US):
        for name in ("aten::_foreach_norm", "aten::_foreach_mul_"):
            with host.operator(name, before_ns=20 * US):
                host.launch("multi_tensor", queue, 20 * US)


DEVICE_FAULTS: dict[str, Callable[[], Machine]] = {
    "placement_clean": _steps,
    "host_created_tensor_fault": lambda: _steps(_mask_on_host),
    "host_created_tensor_clean": lambda: _steps(_mask_on_device),
    "device_ping_pong_fault": lambda: _steps(_there_and_back),
    "device_ping_pong_clean": lambda: _steps(_kept),
    "cpu_fallback_fault": lambda: _steps(_sorted_on_host),
    "cpu_fallback_clean": lambda: _steps(_sorted_on_device),
    "late_first_launch_fault": lambda: _steps(before=_prepare),
    "late_first_launch_clean": lambda: _steps(before=_prepared),
    "device_tail_fault": lambda: _steps(after=_results_to_host),
    "device_tail_clean": _steps,
    "gradient_clipping_fault": lambda: _steps(after=_clip_one_by_one),
    "gradient_clipping_clean": lambda: _steps(after=_clip_at_once),
}
"""By name: NAME_fault is slow for one reason, NAME_clean does the same without it."""
