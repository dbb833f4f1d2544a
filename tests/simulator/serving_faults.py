"""Engines and loops that serve with one fault each, and their clean twins. Times are whole microseconds."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulator.device import Queue
from tests.simulator.host import Host
from tests.simulator.machine import Machine

US = 1_000
KERNELS = 20
TOKENS = 10
_EXECUTE = "vllm/v1/worker/gpu_model_runner.py(2907): execute_model"
_FORWARD = "vllm/model_executor/models/llama.py(276): forward"


def _machine() -> tuple[Machine, Host, Queue]:
    machine = Machine(tick_ns=US)
    return machine, machine.host("main"), machine.queue()


def _range(context: int, context_tokens: int, generation: int) -> str:
    return f"execute_context_{context}({context_tokens})_generation_{generation}({generation})"


def _eager(host: Host, queue: Queue, kernel_us: int, frame: str = _FORWARD) -> None:
    with host.frame(frame, before_ns=2 * US):
        for index in range(KERNELS):
            with host.operator(f"aten::layer{index}", before_ns=8 * US):
                host.launch("gemm", queue, kernel_us * US)


def _graph(host: Host, queue: Queue, kernel_us: int) -> None:
    host.graph_launch([(f"gemm_{index}", queue, kernel_us * US) for index in range(KERNELS)], call_ns=10 * US)


def _decode(host: Host, queue: Queue, requests: int, *, graph: bool, kernel_us: int = 3, wait: bool = True) -> None:
    with host.annotation(_range(0, 0, requests)), host.frame(_EXECUTE, before_ns=2 * US):
        (_graph if graph else _eager)(host, queue, kernel_us)
        if wait:
            host.synchronize_queue(queue)


def decode_graphs(graphed: Callable[[int], bool]) -> Machine:
    """Decoding with growing batches; which iterations run as graphs depends on the requests."""
    machine, main, queue = _machine()
    for requests in range(1, TOKENS + 1):
        _decode(main, queue, requests, graph=graphed(requests), wait=False)
        main.work(3 * US)
    main.synchronize_queue(queue)
    return machine


def between_iterations(*, fault: bool) -> Machine:
    """The host schedules and handles tokens for 200 us: between iterations, or while the device works."""
    machine, main, queue = _machine()
    for _ in range(TOKENS):
        _decode(main, queue, 8, graph=True, kernel_us=20, wait=fault)
        with main.frame("serve.py(30): handle_tokens", before_ns=200 * US):
            pass
    return machine


def prefill_stall(*, fault: bool) -> Machine:
    """A prompt of 4,000 tokens arrives while 7 requests are decoded: computed at once, or in pieces beside them."""
    machine, main, queue = _machine()
    for _ in range(4):
        _decode(main, queue, 7, graph=True, kernel_us=10)
    if fault:
        with main.annotation(_range(1, 4000, 0)), main.frame(_EXECUTE, before_ns=2 * US):
            _eager(main, queue, 400)
            main.synchronize_queue(queue)
    else:
        for _ in range(8):
            with main.annotation(_range(1, 500, 7)), main.frame(_EXECUTE, before_ns=2 * US):
                _graph(main, queue, 25)
                main.synchronize_queue(queue)
    for _ in range(6):
        _decode(main, queue, 8, graph=True, kernel_us=10)
    return machine


def one_request(*, fault: bool) -> Machine:
    """A loop that generates for four prompts, one after the other or together."""
    machine, main, queue = _machine()
    for _ in range(4 if fault else 1):
        requests = 1 if fault else 4
        for token in range(TOKENS):
            with main.frame("generate.py(20): next_token", before_ns=2 * US):
                with main.operator("aten::embedding", (50257, 768), (requests, 1 if token else 12), before_ns=2 * US):
                    main.launch("embedding", queue, 2 * US)
                _eager(main, queue, 15, "model.py(30): forward")
                main.synchronize_queue(queue)
    return machine


def offloaded(*, fault: bool) -> Machine:
    """Blocks of the cache come from the host in each iteration, 64 MiB in 2 ms, or only the tokens do."""
    machine, main, queue = _machine()
    for _ in range(TOKENS):
        with main.annotation(_range(0, 0, 8)), main.frame(_EXECUTE, before_ns=2 * US):
            main.copy_to_device(
                64 << 20 if fault else 64, queue, duration_ns=2_000 * US if fault else 2 * US, pageable=False
            )
            _graph(main, queue, 150)
    return machine


SERVING_FAULTS: dict[str, Callable[[], Machine]] = {
    "decode_graphs_fault": lambda: decode_graphs(lambda _: False),
    "decode_graphs_clean": lambda: decode_graphs(lambda _: True),
    "missed_graphs_fault": lambda: decode_graphs(lambda requests: requests <= 4),
    "missed_graphs_clean": lambda: decode_graphs(lambda _: True),
    "between_iterations_fault": lambda: between_iterations(fault=True),
    "between_iterations_clean": lambda: between_iterations(fault=False),
    "one_request_fault": lambda: one_request(fault=True),
    "one_request_clean": lambda: one_request(fault=False),
}
"""Without prefill_stall, which costs latency and no time: a note is no first finding."""
