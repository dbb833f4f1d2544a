"""Facts about the recorded program beyond its events: settings of loaders, optimizers, torch and the process.

The recorder writes the facts to the trace's header under KEY, and the readers load them into `Metadata.program`. Any
field may be missing; None or empty means unknown. This module has few imports: the user's process loads it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from stepscope.files import converted

KEY: Final = "stepscope"
"""Name of the entry in the header of a Chrome-trace file."""
_LARGEST: Final = 2**62


class LoaderFacts(msgspec.Struct, kw_only=True, frozen=True):
    """One `DataLoader` that was iterated.

    Attributes:
        batches: in one iteration, if one was finished.
        iterators: number of iterators created while steps were recorded.
        prefetch_factor: batches prefetched by each worker.
    """

    dataset: str = ""
    workers: int | None = None
    batch_size: int | None = None
    batches: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    prefetch_factor: int | None = None
    start_method: str | None = None
    iterators: int | None = None


class InputStageFacts(msgspec.Struct, kw_only=True, frozen=True):
    """One stage of the input pipeline, in the process or in workers, while steps were recorded.

    Attributes:
        stage: "item" (the dataset's `__getitem__` or iterator), "transform", "collate", "sampler" (which chooses the
            items, always in the process itself), "pin" or "worker_start".
        name: the function, such as "CocoDataset.__getitem__".
        file, line: location of its definition.
        total_ns, processor_ns: wall time and processor time.
        in_workers: whether worker processes ran it.
    """

    stage: str = ""
    name: str = ""
    file: str | None = None
    line: int | None = None
    calls: int = 0
    total_ns: int = 0
    processor_ns: int | None = None
    in_workers: bool = False


class OptimizerFacts(msgspec.Struct, kw_only=True, frozen=True):
    """One optimizer of the program.

    Attributes:
        implementation: the implementation its step uses, given its settings and devices: "fused", "foreach" or
        "single". device: type of the device with most of its tensors.
    """

    name: str = ""
    tensors: int | None = None
    implementation: str | None = None
    device: str | None = None
    foreach: bool | None = None
    fused: bool | None = None
    capturable: bool | None = None


class DataParallelFacts(msgspec.Struct, kw_only=True, frozen=True):
    """One `DistributedDataParallel` or `DataParallel` module."""

    kind: str = ""
    devices: int | None = None
    backend: str | None = None
    bucket_bytes: int | None = None
    gradient_bytes: int | None = None
    find_unused_parameters: bool | None = None
    gradient_as_bucket_view: bool | None = None
    static_graph: bool | None = None
    unused_parameters: int | None = None


class ModelFacts(msgspec.Struct, kw_only=True, frozen=True):
    """Totals over the outermost modules."""

    parameters: int | None = None
    parameter_bytes: int | None = None
    gradient_bytes: int | None = None
    optimizer_state_bytes: int | None = None
    buffer_bytes: int | None = None


class CompilationFacts(msgspec.Struct, kw_only=True, frozen=True):
    """One compilation of a Python function, and the guard that failed before it.

    Attributes:
        reason: the compiler's text for what changed; None for a first compilation.
        start_unix_ns: nanoseconds since 1970.
    """

    function: str = ""
    file: str | None = None
    line: int | None = None
    reason: str | None = None
    start_unix_ns: int | None = None
    duration_ns: int | None = None


class PauseFacts(msgspec.Struct, kw_only=True, frozen=True):
    """One run of Python's garbage collector while steps were recorded.

    Attributes:
        start_unix_ns: nanoseconds since 1970.
        generation: the oldest generation collected, 0 to 2.
        thread: the operating system's id of the thread that was paused.
        collected: number of freed objects.
        file, line, function: location in the user's code.
        called: whether that line calls the collector itself; None if the line cannot be read.
    """

    start_unix_ns: int = 0
    duration_ns: int = 0
    generation: int = 0
    thread: int | None = None
    collected: int | None = None
    file: str | None = None
    line: int | None = None
    function: str | None = None
    called: bool | None = None


class StepFacts(msgspec.Struct, kw_only=True, frozen=True):
    """Operating system counters of one recorded step, for the thread that runs the steps or for the process.

    Attributes:
        index: number of the step.
        duration_ns: wall time.
        thread_processor_ns: time the thread ran on a processor.
        thread_system_ns: the part of it in the kernel, such as to map memory.
        thread_waiting_ns: time the thread was runnable and waited for a processor.
        process_processor_ns: processor time of all threads of the process.
        context_switches, involuntary_switches: of the thread; the second is part of the first.
        minor_faults: pages that were mapped for the process.
        core: the core of the thread at the end of the step.
        clock_mhz: clock of that core.
        pressure_ns: time in which some task of the machine or container waited for a processor.
        throttled_ns: time in which the container's quota throttled its tasks.
        collector_ns: time the thread spent in Python's garbage collector.
    """

    index: int = 0
    duration_ns: int = 0
    thread_processor_ns: int | None = None
    thread_system_ns: int | None = None
    thread_waiting_ns: int | None = None
    process_processor_ns: int | None = None
    context_switches: int | None = None
    involuntary_switches: int | None = None
    minor_faults: int | None = None
    core: int | None = None
    clock_mhz: float | None = None
    pressure_ns: int | None = None
    throttled_ns: int | None = None
    collector_ns: int | None = None


class PaddingFacts(msgspec.Struct, kw_only=True, frozen=True):
    """Sampled amounts of padding and ignored positions in the integer tensors of the program's batches.

    Attributes:
        name: name of the tensor in its batch, such as "input_ids", or else its position.
        batches: number of sampled batches.
        positions: number of positions in them.
        padding_share: share of positions that only fill rows up to the longest, 0 to 1.
        sorted_padding_share: the same share if the rows were batched by length.
        longest: length of the longest row.
        ignored_share: share of positions with the value -100, which losses ignore by default.
    """

    name: str = ""
    batches: int = 0
    positions: int = 0
    padding_share: float | None = None
    sorted_padding_share: float | None = None
    longest: int | None = None
    ignored_share: float | None = None


class PromptFacts(msgspec.Struct, kw_only=True, frozen=True):
    """What the outermost module was called with, in calls of several tokens for each row.

    Attributes:
        calls: that were seen.
        tokens: in them, without padding.
        repeated_tokens: those at the beginning of a row, in blocks with which a row of an earlier call began, too.
    """

    calls: int = 0
    tokens: int = 0
    repeated_tokens: int = 0


class ModelCallFacts(msgspec.Struct, kw_only=True, frozen=True):
    """The latest calls of the outermost module, as the recorder saw their tokens.

    Attributes:
        files: of the functions around them.
        calls: of each call, in order: when it began (nanoseconds since 1970), the requests in it, how many of them
            begin with it, and the tokens of all.
    """

    files: tuple[str, ...] = ()
    calls: tuple[tuple[int, int, int, int], ...] = ()


class WaitingFacts(msgspec.Struct, kw_only=True, frozen=True):
    """Where a thread other than the steps' own stood in the user's code when the recording began."""

    file: str = ""
    line: int = 0
    function: str = ""


class LoopFacts(msgspec.Struct, kw_only=True, frozen=True):
    """One loop in the user's source.

    Attributes:
        line: of its head.
        first, last: lines of its body.
        carried: names whose value from the previous repetition is read, other than to collect values in them.
        is_comprehension: whether it is a comprehension or a generator expression.
    """

    file: str = ""
    line: int = 0
    first: int = 0
    last: int = 0
    carried: tuple[str, ...] = ()
    is_comprehension: bool = False


class BindingFacts(msgspec.Struct, kw_only=True, frozen=True):
    """A statement of the user's source that binds a name, or changes what it stands for.

    Attributes:
        function: line where the function begins; 0 outside of functions.
        first, last: lines of the statement.
        is_change: whether it only changes what the name stands for.
    """

    file: str = ""
    function: int = 0
    name: str = ""
    first: int = 0
    last: int = 0
    is_change: bool = False


class OperationFacts(msgspec.Struct, kw_only=True, frozen=True):
    """The operations that the statements of one of the user's files make themselves.

    Attributes:
        names: for each line from the first on, those in its statement, separated by spaces: the methods that it calls,
            each followed by its options ("fused=True" if it switches one on, or else "fused="), and torch's names of
            the arithmetic operators and comparisons.
    """

    file: str = ""
    names: tuple[str, ...] = ()


class FunctionFacts(msgspec.Struct, kw_only=True, frozen=True):
    """One function of the user's source.

    Attributes:
        name: with the name of its class.
        line, last: where it begins and ends.
        calls: names that it reads and may call: those of its own class with the class's name, and those of other
            objects and modules as ".name".
        changes_by_itself: whether its results may differ for the same arguments, as with random numbers.
    """

    file: str = ""
    name: str = ""
    line: int = 0
    last: int = 0
    calls: tuple[str, ...] = ()
    changes_by_itself: bool = False


class WorkFacts(msgspec.Struct, kw_only=True, frozen=True):
    """What a part of a function does, as far as its source tells.

    Attributes:
        function: line where the function begins.
        kind: "constant" (reads nothing that depends on the arguments), "lookup" (searches a list for a value),
            "maybe_lookup" (searches what may be a list), "row" (takes a row from a table, or uses it), "growing" (reads
            a slice that grows with a loop's variable), "converted" (to a tensor or an array), "masked" (a comparison
            of a whole column, and indexing by it), "shuffled" or "weighted" (a draw by `choice` without replacement or
            by probabilities), "appended" (joined with a new part in a loop) or "loop".
        name: what is bound, searched or read; "" if it has no name.
        first, last: lines.
        calls: as in `FunctionFacts`.
    """

    file: str = ""
    function: int = 0
    kind: str = ""
    name: str = ""
    first: int = 0
    last: int = 0
    calls: tuple[str, ...] = ()


class ListFacts(msgspec.Struct, kw_only=True, frozen=True):
    """A list that a function of the user can reach, with its length.

    Attributes:
        function: line where the function begins.
        growth: how many entries longer it was than a step before.
        read: first and last lines of statements of the function that read it, if it grows.
    """

    file: str = ""
    function: int = 0
    name: str = ""
    length: int = 0
    growth: int = 0
    read: tuple[tuple[int, int], ...] = ()


class MetricFacts(msgspec.Struct, kw_only=True, frozen=True):
    """A statement of the user's source that computes with values copied from tensors and makes no tensor from them.

    Attributes:
        function: name of the function; "<module>" outside of functions.
        first, last: its lines, or those of a function that is called with such values.
    """

    file: str = ""
    function: str = ""
    first: int = 0
    last: int = 0


class MadeFacts(msgspec.Struct, kw_only=True, frozen=True):
    """Objects that a line of the user's code makes in each step.

    Attributes:
        kind: "optimizer", "module", "loader", "dataset", "pool" or "compiled function".
        name: of the class.
        calls: made in a step.
        ns: time to make one.
    """

    kind: str = ""
    name: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    calls: int = 0
    ns: int = 0


class ValueFacts(msgspec.Struct, kw_only=True, frozen=True):
    """The hashed values of one function's result, of one of its variables when it ended, or of a module's result.

    Attributes:
        file, function: the function; empty for a module.
        line, last: where the function begins (0 for code outside of functions) and ends.
        name: of the variable; "" for the result.
        module: path of the module, as in the table `modules`.
        calls: number of values in a step.
        distinct: number of different ones among them.
        is_constant: whether each step had the same values in the same order.
    """

    file: str = ""
    function: str = ""
    line: int = 0
    last: int = 0
    name: str = ""
    module: str = ""
    calls: int = 0
    distinct: int = 0
    is_constant: bool = False


class EvaluationFacts(msgspec.Struct, kw_only=True, frozen=True):
    """How often modules are switched to evaluation mode, by the steps until the end of the recording.

    Attributes:
        seen: number of steps.
        steps: those in which a module was switched to evaluation mode.
        every: steps from one to the next, the median; without a second one, `seen`.
        step_ns, evaluating_ns: median duration of steps without and with an evaluation, while nothing was recorded.
        file, line, function: where the mode was last set.
    """

    seen: int = 0
    steps: int = 0
    every: float = 0.0
    step_ns: int | None = None
    evaluating_ns: int | None = None
    file: str = ""
    line: int = 0
    function: str = ""


class BackwardFacts(msgspec.Struct, kw_only=True, frozen=True):
    """A backward pass in each step that computes unused gradients.

    Attributes:
        nodes: number of its autograd nodes, without those that accumulate gradients.
        order: its place among the step's passes with as many nodes.
        needless: (first, last) of runs of nodes, in the order of their creation, that lead only to unused gradients.
        halves: the same for nodes of products if only one of their two gradients is used.
        modules: paths of the modules whose parameters get such gradients.
        parameters, bytes: their number of elements and size.
        is_cleared: whether all gradients are cleared before an optimizer's step; else the parameters, or some of them,
            are in no optimizer.
    """

    nodes: int = 0
    order: int = 0
    needless: tuple[tuple[int, int], ...] = ()
    halves: tuple[tuple[int, int], ...] = ()
    modules: tuple[str, ...] = ()
    parameters: int = 0
    bytes: int = 0
    is_cleared: bool = False


class KeptGraphFacts(msgspec.Struct, kw_only=True, frozen=True):
    """A variable that keeps the autograd graphs of steps that have ended.

    Attributes:
        file, function, line: the function, and where it begins; 0 outside of functions.
        name: of the variable.
        nodes: autograd nodes that a step adds.
    """

    file: str = ""
    function: str = ""
    line: int = 0
    name: str = ""
    nodes: int = 0


class ConstantFacts(msgspec.Struct, kw_only=True, frozen=True):
    """A line of the user's code that calls functions of torch with the same inputs in each step.

    Attributes:
        calls: names of the functions that it calls in a step, in order.
        constant: places in `calls` of those with the same inputs.
    """

    file: str = ""
    function: str = ""
    line: int = 0
    calls: tuple[str, ...] = ()
    constant: tuple[int, ...] = ()


class SparseFacts(msgspec.Struct, kw_only=True, frozen=True):
    """A tensor of mostly zeros that a line of the user's code multiplies as a dense one.

    Attributes:
        shape: of the tensor.
        nonzero: number of its elements that are not zero.
    """

    file: str = ""
    line: int = 0
    shape: tuple[int, ...] = ()
    nonzero: int = 0


class ProgramFacts(msgspec.Struct, kw_only=True, frozen=True):
    """Settings and counts of the recorded program.

    Attributes:
        torch: settings of torch, such as {"version", "threads", "interop_threads", "float32_matmul_precision",
            "cudnn_allow_tf32", "cudnn_benchmark", "deterministic", "anomaly_detection", "default_dtype",
            "recompile_limit"}.
        process: figures of the process and machine, such as {"processors", "usable_processors", "numa_nodes",
            "threads", "allocator"}, and of the recorded steps {"garbage_collection_ns", "garbage_collections",
            "checkpoint_bytes", "other_cores"}, the last being how many of the usable processors other programs kept
            busy; also {"warm_up_ns", "warm_up_faults"}, the time before the steps in which the profiler
            was ready but not recording, and the page faults of the process in it.
        environment: environment variables that affect speed.
        start: nanoseconds since the start of the process, {"torch_imported_ns", "first_step_ns", "recording_ns"}.
        pauses: only the long ones.
        module_functions: `forward` of modules that a library other than torch defines, as "file:line function", by the
            modules' names as `module_pattern` gives them.
        stack: files in which the steps' thread was when a step ended, but torch's and stepscope's, outermost first.
    """

    loaders: tuple[LoaderFacts, ...] = ()
    input_stages: tuple[InputStageFacts, ...] = ()
    optimizers: tuple[OptimizerFacts, ...] = ()
    data_parallel: tuple[DataParallelFacts, ...] = ()
    model: ModelFacts | None = None
    compilations: tuple[CompilationFacts, ...] = ()
    torch: dict[str, str | int | float | bool | None] = {}
    process: dict[str, str | int | float | bool | None] = {}
    environment: dict[str, str] = {}
    start: dict[str, int] = {}
    pauses: tuple[PauseFacts, ...] = ()
    padding: tuple[PaddingFacts, ...] = ()
    prompts: PromptFacts | None = None
    model_calls: ModelCallFacts | None = None
    waiting: tuple[WaitingFacts, ...] = ()
    module_functions: dict[str, str] = {}
    stack: tuple[str, ...] = ()
    steps: tuple[StepFacts, ...] = ()
    backward: tuple[BackwardFacts, ...] = ()
    constants: tuple[ConstantFacts, ...] = ()
    sparse: tuple[SparseFacts, ...] = ()
    kept_graphs: tuple[KeptGraphFacts, ...] = ()
    loops: tuple[LoopFacts, ...] = ()
    bindings: tuple[BindingFacts, ...] = ()
    values: tuple[ValueFacts, ...] = ()
    functions: tuple[FunctionFacts, ...] = ()
    works: tuple[WorkFacts, ...] = ()
    operations: tuple[OperationFacts, ...] = ()
    lists: tuple[ListFacts, ...] = ()
    made: tuple[MadeFacts, ...] = ()
    evaluations: EvaluationFacts | None = None
    metrics: tuple[MetricFacts, ...] = ()

    @property
    def other_cores(self) -> float | None:
        """Processors that other programs kept busy while the steps were recorded, on average; None if unknown."""
        value = self.process.get("other_cores")
        return float(value) if type(value) in (int, float) else None  # type: ignore[arg-type]

    def process_figure(self, name: str) -> int | None:
        """An integer of `process`; None if it is missing or no integer."""
        value = self.process.get(name)
        return value if type(value) is int else None


def to_json(facts: ProgramFacts) -> str:
    return msgspec.json.encode(facts).decode()


def from_header(value: Any) -> ProgramFacts | None:
    """Return the facts in a trace's header; None if they are missing or damaged."""
    if not isinstance(value, dict):
        return None
    try:
        return converted(value, ProgramFacts) if _fits(value) else None
    except (msgspec.ValidationError, RecursionError):
        return None


def _fits(value: Any) -> bool:
    """Whether all numbers fit 64 bits, with room for sums."""
    if isinstance(value, dict):
        return all(map(_fits, value.values()))
    if isinstance(value, list):
        return all(map(_fits, value))
    return not isinstance(value, (int, float)) or -_LARGEST < value < _LARGEST
