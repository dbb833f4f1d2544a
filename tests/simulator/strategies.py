"""Random programs: a hypothesis strategy that yields machines which have run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import assume
from hypothesis import strategies as st

from tests.simulator.device import Event, Queue
from tests.simulator.host import Host
from tests.simulator.machine import Machine
from tests.simulator.timeline import ANNOTATION, DATA_LOADER_PREFIX, FRAME, OPERATOR, OPTIMIZER_PREFIX, STEP_PREFIX

OPERATORS = ("aten::mm", "aten::add", "aten::item", "aten::nonzero", "autograd::engine::evaluate_function: MmBackward0")
FRAMES = (
    "train.py(12): step",
    "nn.Module: Linear_0",
    "torch/_dynamo/convert_frame.py(100): compile",
    "torch/_inductor/compile_fx.py(700): compile_fx_inner",
    "torch/nn/modules/linear.py(114): forward",
)
ANNOTATIONS = ("forward", "Optimizer.step#AdamW.step", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")


@dataclass(frozen=True)
class Action:
    """One line of a random program: what to do and the numbers to do it with, in ticks."""

    kind: str
    first: int
    second: int
    third: int


class Run:
    """A random program being run: its threads, its queues and what they remember."""

    def __init__(self, machine: Machine, hosts: list[Host], queues: list[Queue]) -> None:
        self.machine = machine
        self.hosts = hosts
        self.queues = queues
        self.events: list[Event] = []
        self.steps = 0
        self.tick_ns = machine.ledger.tick_ns

    def pick(self, number: int) -> Queue:
        return self.queues[number % len(self.queues)]

    def do(self, host: Host, action: Action) -> None:
        numbers = (action.first, action.second, action.third)
        ACTIONS[action.kind](self, host, *numbers)

    def finish(self) -> None:
        for host in self.hosts:
            while host.stack:
                host.close()


def _open(category: str, names: tuple[str, ...]) -> Callable[[Run, Host, int, int, int], None]:
    def open_slice(run: Run, host: Host, first: int, second: int, third: int) -> None:
        if category != FRAME or run.machine.ledger.with_frames:
            host.open(category, names[first % len(names)])
        host.work(second * run.tick_ns)

    return open_slice


def _open_annotation(run: Run, host: Host, first: int, second: int, third: int) -> None:
    """Only the main thread, which is known by them, holds the framework's annotations."""
    marks = (DATA_LOADER_PREFIX, OPTIMIZER_PREFIX)
    names = tuple(name for name in ANNOTATIONS if host.is_main or not name.startswith(marks))
    _open(ANNOTATION, names)(run, host, first, second, third)


def _open_step(run: Run, host: Host, first: int, second: int, third: int) -> None:
    in_step = any(slice_.name.startswith(STEP_PREFIX) for slice_ in host.stack)
    if host.is_main and not in_step:
        host.open(ANNOTATION, f"{STEP_PREFIX}{run.steps}")
        run.steps += 1
        host.work(first * run.tick_ns)


def _close(run: Run, host: Host, first: int, second: int, third: int) -> None:
    host.work(second * run.tick_ns)
    for _ in range(first % 3 + 1):
        if host.stack:
            host.close()


def _work(run: Run, host: Host, first: int, second: int, third: int) -> None:
    host.work(first * run.tick_ns)


def _flush(run: Run, host: Host, first: int, second: int, third: int) -> None:
    host.profiler_flush(first * run.tick_ns)


def _launch(run: Run, host: Host, first: int, second: int, third: int) -> None:
    name = "ncclDevKernel_AllReduce" if first % 4 == 3 else "gemm"
    durations = ((first + 1) * run.tick_ns, second * run.tick_ns, third * run.tick_ns)
    host.launch(name, run.pick(second), *durations, driver=third % 2 == 1)


def _graph(run: Run, host: Host, first: int, second: int, third: int) -> None:
    kernels = [(f"node_{index}", run.pick(first + index), (index + 1) * run.tick_ns) for index in range(third % 5 + 1)]
    host.graph_launch(kernels, second * run.tick_ns, third * run.tick_ns)


def _transfer(run: Run, host: Host, first: int, second: int, third: int) -> None:
    queue, copies = run.pick(second), (host.copy_to_device, host.copy_to_host, host.copy_on_device)
    times = {"call_ns": third * run.tick_ns, "latency_ns": second * run.tick_ns}
    if first % 4 == 3:
        host.memset(queue, duration_ns=(first + 1) * run.tick_ns, **times)
        return
    times |= {"duration_ns": (first + 1) * run.tick_ns, "operator_ns": third % 3 * run.tick_ns}
    pageable = {"pageable": second % 2 == 0} if first % 4 < 2 else {}
    copies[first % 4](4096, queue, **times, **pageable)


def _item(run: Run, host: Host, first: int, second: int, third: int) -> None:
    host.item(
        run.pick(first),
        duration_ns=(first + 1) * run.tick_ns,
        operator_ns=second % 3 * run.tick_ns,
        call_ns=third * run.tick_ns,
        latency_ns=second * run.tick_ns,
    )


def _synchronize(run: Run, host: Host, first: int, second: int, third: int) -> None:
    queue, call_ns, return_ns = run.pick(first), second * run.tick_ns, third % 4 * run.tick_ns
    if first % 3 == 0:
        host.synchronize_queue(queue, call_ns=call_ns, return_ns=return_ns)
    elif first % 3 == 1:
        host.synchronize_device(queue.device, call_ns=call_ns, return_ns=return_ns)
    elif run.events:
        host.synchronize_event(run.events[second % len(run.events)], call_ns=call_ns, return_ns=return_ns)


def _event(run: Run, host: Host, first: int, second: int, third: int) -> None:
    if first % 2 == 0 or not run.events:
        run.events.append(host.record_event(run.pick(second), call_ns=third * run.tick_ns))
    else:
        event, latency_ns = run.events[first % len(run.events)], second % 7 * run.tick_ns
        host.wait_event(run.pick(second), event, call_ns=third * run.tick_ns, latency_ns=latency_ns)


def _allocate(run: Run, host: Host, first: int, second: int, third: int) -> None:
    (host.allocate if first % 2 else host.free)(second * run.tick_ns)


def _lost_launch(run: Run, host: Host, first: int, second: int, third: int) -> None:
    start_ns = host.now_ns + second * run.tick_ns
    run.machine.work_without_launch("lost", run.pick(third), start_ns, (first + 1) * run.tick_ns)


def _hand_over(run: Run, host: Host, first: int, second: int, third: int) -> None:
    other = run.hosts[second % len(run.hosts)]
    (host.hand_over if first % 2 else host.wait_for)(other)


ACTIONS: dict[str, Callable[[Run, Host, int, int, int], None]] = {
    "close": _close,
    "work": _work,
    "launch": _launch,
    "open_operator": _open(OPERATOR, OPERATORS),
    "open_frame": _open(FRAME, FRAMES),
    "open_annotation": _open_annotation,
    "open_step": _open_step,
    "graph": _graph,
    "transfer": _transfer,
    "item": _item,
    "synchronize": _synchronize,
    "event": _event,
    "allocate": _allocate,
    "hand_over": _hand_over,
    "lost_launch": _lost_launch,
    "flush": _flush,
}
KINDS = ("launch", "close", *ACTIONS)


def _actions(longest: int) -> st.SearchStrategy[list[Action]]:
    small = st.integers(0, 12)
    number = st.one_of(small, small, st.integers(0, 400))
    action = st.builds(Action, st.sampled_from(KINDS), number, number, number)
    return st.lists(action, max_size=longest)


@st.composite
def programs(draw: st.DrawFn, *, tick_ns: int = 1, longest: int = 40) -> Machine:
    """Machines that ran a random program: up to 3 threads of ``longest`` actions each, on up to 4 queues of 2 devices.

    All times are multiples of ``tick_ns``. The thread whose clock is behind acts next, so that what happens is
    simulated in the order in which it happens.
    """
    machine = Machine(
        tick_ns=tick_ns, with_frames=draw(st.booleans()), front_end_gap_ns=draw(st.integers(0, 3)) * tick_ns
    )
    scripts = draw(st.lists(_actions(longest), min_size=1, max_size=3))
    hosts = [machine.host(name) for name in ("main", "backward", "loader")[: len(scripts)]]
    places = draw(st.lists(st.sampled_from([(0, 7), (0, 20), (1, 7), (1, 24)]), min_size=1, max_size=4, unique=True))
    run = Run(machine, hosts, [machine.queue(*place) for place in places])
    for host in hosts:
        host.work(draw(st.integers(0, 20)) * tick_ns)
    waiting = [(host, list(reversed(script))) for host, script in zip(hosts, scripts, strict=True)]
    while waiting := [(host, script) for host, script in waiting if script]:
        host, script = min(waiting, key=lambda pair: pair[0].now_ns)
        run.do(host, script.pop())
    run.finish()
    assume(not _has_closure(hosts))
    return machine


def _has_closure(hosts: list[Host]) -> bool:
    """Whether the backward pass runs in an optimizer's step, as in a closure: the truth here tells none."""
    slices = [slice_ for host in hosts for slice_ in host.slices]
    steps = [slice_ for slice_ in slices if slice_.name.startswith(OPTIMIZER_PREFIX)]
    nodes = [slice_.start_ns for slice_ in slices if slice_.name.startswith("autograd::engine")]
    return any(step.start_ns <= start_ns <= step.closed_ns for step in steps for start_ns in nodes)
