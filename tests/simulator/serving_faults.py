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


def rejected_drafts(*, fault: bool, accepted: int = 0, marked: bool = True) -> Machine:
    """Three tokens are drafted for each of 4 requests and checked with a fourth; or each request gets one token.

    Args:
        accepted: of the drafted tokens of a request.
        marked: whether the engine marks drafting with a range.
    """
    machine, main, queue = _machine()
    tokens, keys = (16 if fault else 4), 400
    for _ in range(TOKENS):
        name = f"execute_context_0(sq0sk0sqsq0sqsk0)_generation_4(sq{tokens}sk{keys + tokens}sqsq64sqsk1664)"
        with main.annotation(name), main.frame(_EXECUTE, before_ns=2 * US):
            _graph(main, queue, 20)
        if fault:
            with main.annotation("gpu_model_runner: draft" if marked else "propose"):
                main.graph_launch([(f"draft_{index}", queue, 60 * US) for index in range(3)], call_ns=10 * US)
        main.synchronize_queue(queue)
        keys += 4 + 4 * accepted
    return machine


def padded_graphs(*, fault: bool) -> Machine:
    """Graphs for 8, 64 and 128 requests, which each request makes 4 us longer: 65 are padded to 128, or 64 fit."""
    machine, main, queue = _machine()
    sizes = (8, 64, 128)
    for size in sizes:
        with main.annotation(f"capture_{size}_FULL"), main.capture():
            main.captured_launch("gemm")
    for requests in (8, 8, *[65 if fault else 64] * TOKENS):
        captured = next(size for size in sizes if size >= requests)
        _decode(main, queue, requests, graph=True, kernel_us=10 + captured // 5, wait=False)
    main.synchronize_queue(queue)
    return machine


def tensor_parallel(*, fault: bool) -> Machine:
    """Eight layers of a model divided among ranks, each of which ends by reducing what it made; or of a whole one."""
    machine, main, queue = _machine()
    for _ in range(TOKENS):
        with main.annotation(_range(0, 0, 8)), main.frame(_EXECUTE, before_ns=2 * US):
            for _layer in range(8):
                with main.operator("aten::mm", before_ns=6 * US):
                    main.launch("gemm", queue, 40 * US)
                if fault:
                    with main.operator("vllm::all_reduce", (8, 4096), before_ns=6 * US, kind="c10::BFloat16"):
                        main.launch("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", queue, 20 * US)
            main.synchronize_queue(queue)
    return machine


def unequal_batches(*, fault: bool) -> Machine:
    """Ten iterations decode up to 32 requests, most of them 4; or all of them 32."""
    machine, main, queue = _machine()
    for number in range(TOKENS):
        _decode(main, queue, 4 if fault and number > 1 else 32, graph=True, kernel_us=30, wait=False)
    main.synchronize_queue(queue)
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
    "rejected_drafts_fault": lambda: rejected_drafts(fault=True),
    "rejected_drafts_clean": lambda: rejected_drafts(fault=False),
    "tensor_parallel_fault": lambda: tensor_parallel(fault=True),
    "tensor_parallel_clean": lambda: tensor_parallel(fault=False),
    "padded_graphs_fault": lambda: padded_graphs(fault=True),
    "padded_graphs_clean": lambda: padded_graphs(fault=False),
}
"""Without prefill_stall and unequal_batches, which cost no time of a step: a note is no first finding."""
