"""Programs whose device multiplies, converts or exchanges more than it has to, each with its clean twin."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulator.device import Queue
from tests.simulator.host import Host
from tests.simulator.machine import Machine

US = 1_000
STEPS = 6
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
_HALF = "c10::Half"
_HEADS, _KEYS, _SCORES = (64, 512, 64), (64, 64, 512), (64, 512, 512)


def _steps(body: Callable[[Host, Queue, int], None], steps: int = STEPS) -> Machine:
    """Steps that end when the device has finished, as long as it is busy throughout."""
    machine = Machine(tick_ns=US)
    main, queue = machine.host("main"), machine.queue()
    for index in range(steps):
        with main.step(index), main.frame("train.py(12): step", before_ns=3 * US):
            body(main, queue, index)
            main.synchronize_device()
    return machine


def _convolutions(host: Host, queue: Queue, *, converting: bool) -> None:
    for index in range(8):
        with host.operator("aten::cudnn_convolution", before_ns=6 * US):
            if converting:
                host.launch("void cudnn::ops::nchwToNhwcKernel<__half, __half, float>", queue, 30 * US)
            host.launch(f"sm80_xmma_fprop_implicit_gemm_f16f16_{index}", queue, 150 * US)


def layout_conversion(*, fault: bool) -> Machine:
    """A library converts every convolution's input into its own layout."""
    return _steps(lambda host, queue, _: _convolutions(host, queue, converting=fault))


def unaligned_vocabulary(*, fault: bool) -> Machine:
    """Products with a vocabulary of 50,257, which are slower than those of 50,304."""
    columns, length = (50_257, 700) if fault else (50_304, 400)

    def body(host: Host, queue: Queue, _: int) -> None:
        for width in (1024, 4096, columns):
            with host.operator("aten::mm", (512, 512), (512, width), before_ns=6 * US, kind=_HALF):
                host.launch(
                    "ampere_fp16_s16816gemm_fp16_128x128", queue, (length if width == columns else width // 125) * US
                )

    return _steps(body)


def written_out_attention(*, fault: bool) -> Machine:
    """Attention by a product, a mask, a softmax and a product; or by one kernel."""

    def body(host: Host, queue: Queue, _: int) -> None:
        for _layer in range(4):
            with host.operator("aten::linear", before_ns=6 * US):
                host.launch("ampere_bf16_s16816gemm_bf16_128x128", queue, 300 * US)
            if not fault:
                with host.operator(
                    "aten::_scaled_dot_product_flash_attention", _HEADS, _HEADS, _HEADS, before_ns=6 * US
                ):
                    host.launch("flash_fwd_kernel", queue, 100 * US)
                continue
            for name, shapes, kernel_us in (
                ("aten::bmm", (_HEADS, _KEYS), 60),
                ("aten::mul", (_SCORES,), 80),
                ("aten::softmax", (_SCORES,), 100),
                ("aten::bmm", (_SCORES, _HEADS), 50),
            ):
                with host.operator(name, *shapes, before_ns=5 * US):
                    host.launch(f"kernel_of_{name[6:]}", queue, kernel_us * US)

    return _steps(body)


def small_reductions(*, fault: bool) -> Machine:
    """Gradients are reduced one parameter at a time after the backward pass; or together, during it."""

    def body(host: Host, queue: Queue, _: int) -> None:
        channel = host.ledger.queues.setdefault((0, 24), Queue(0, 24, 0))
        with host.operator("aten::mm", before_ns=6 * US):
            host.launch("gemm", queue, 3000 * US)
        if fault:
            host.wait_event(channel, host.record_event(queue))
        for _parameter in range(60 if fault else 1):
            with host.operator("c10d::allreduce_", before_ns=5 * US):
                host.launch(ALL_REDUCE, channel, 25 * US)

    return _steps(body)


def late_rank(*, fault: bool) -> Machine:
    """Another rank comes late to every other reduction."""

    def body(host: Host, queue: Queue, index: int) -> None:
        channel = host.ledger.queues.setdefault((0, 24), Queue(0, 24, 0))
        with host.operator("aten::mm", before_ns=6 * US):
            host.launch("gemm", queue, 3000 * US)
        host.wait_event(channel, host.record_event(queue))
        with host.operator("c10d::allreduce_", before_ns=5 * US):
            host.launch(ALL_REDUCE, channel, (1500 if fault and index % 2 else 60) * US)

    return _steps(body)


def replicated_model(*, fault: bool) -> Machine:
    """DataParallel copies the model to a second device in every step; or each device has a process of its own."""

    def body(host: Host, queue: Queue, _: int) -> None:
        if fault:
            other = host.ledger.queues.setdefault((1, 7), Queue(1, 7, 0))
            with host.operator("Broadcast", before_ns=20 * US):
                host.launch("ncclDevKernel_Broadcast_RING_LL", queue, 800 * US)
                host.launch("ncclDevKernel_Broadcast_RING_LL", other, 800 * US)
            with host.operator("aten::mm", before_ns=6 * US):
                host.launch("gemm", other, 1500 * US)
        with host.operator("aten::mm", before_ns=6 * US):
            host.launch("gemm", queue, 1500 * US)
        if fault:
            with host.operator("Gather", before_ns=10 * US):
                host.copy_on_device(1 << 20, queue, duration_ns=200 * US)

    return _steps(body)


def exchange_through_host(*, fault: bool) -> Machine:
    """Gradients go to the host and over its network; or from device to device while it computes."""

    def body(host: Host, queue: Queue, _: int) -> None:
        with host.operator("aten::mm", before_ns=6 * US):
            host.launch("gemm", queue, 2000 * US)
        if fault:
            with host.operator("c10d::allreduce_", (262_144,), before_ns=5 * US):
                host.copy_to_host(1 << 20, queue, duration_ns=150 * US)
                with host.operator("gloo:all_reduce", before_ns=1200 * US):
                    pass
                host.copy_to_device(1 << 20, queue, duration_ns=150 * US)
        with host.operator("aten::add_", before_ns=6 * US):
            host.launch("optimizer", queue, 100 * US)

    return _steps(body)


def gradient_copies(*, fault: bool) -> Machine:
    """Reduced gradients are copied out of their buckets."""

    def body(host: Host, queue: Queue, _: int) -> None:
        with host.operator("aten::mm", before_ns=6 * US):
            host.launch("gemm", queue, 2000 * US)
        for _parameter in range(20 if fault else 0):
            with host.operator("torch.distributed.ddp.reducer::copy_bucket_to_grad", before_ns=2 * US):
                host.copy_on_device(1 << 20, queue, duration_ns=20 * US)

    return _steps(body)


_MACHINES = (
    layout_conversion, unaligned_vocabulary, written_out_attention, small_reductions, late_rank, replicated_model,
    exchange_through_host, gradient_copies,
)  # fmt: skip
PARALLEL_FAULTS: dict[str, Callable[[], Machine]] = {
    f"{machine.__name__}_{twin}": (lambda machine=machine, twin=twin: machine(fault=twin == "fault"))
    for machine in _MACHINES
    for twin in ("fault", "clean")
}
