"""What a recording knows of the program beyond its events: settings of loaders, optimizers, torch and the process.

Written by the recorder into the trace's header under KEY, read back by the readers into `Metadata.program`. Every field
may be missing: None or empty means "not known". Stands apart from the readers and imports no more than it needs,
because the user's process loads it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

KEY: Final = "stepscope"
"""Name of the entry in the header of a Chrome-trace file."""


class LoaderFacts(msgspec.Struct, kw_only=True, frozen=True):
    """One `DataLoader` that was iterated.

    Attributes:
        dataset: name of the dataset's class.
        iterators: how many iterations over it began while steps were recorded.
        prefetch_factor: batches ahead for each worker.
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
        stage: "item" (the dataset's `__getitem__` or iterator), "transform", "collate", "pin" or "worker_start".
        name: what ran, such as "CocoDataset.__getitem__".
        file, line: of its definition.
        calls, total_ns, processor_ns: how often, how long by the clock, how long on a processor.
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
    """One optimizer that took a step."""

    name: str = ""
    tensors: int | None = None
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
    """What the outermost modules hold together, in bytes."""

    parameters: int | None = None
    parameter_bytes: int | None = None
    gradient_bytes: int | None = None
    optimizer_state_bytes: int | None = None
    buffer_bytes: int | None = None


class CompilationFacts(msgspec.Struct, kw_only=True, frozen=True):
    """One compilation of a Python function, and the guard that failed before it.

    Attributes:
        reason: the compiler's own words for what changed; None for a first compilation.
        start_unix_ns: when, nanoseconds since 1970.
    """

    function: str = ""
    file: str | None = None
    line: int | None = None
    reason: str | None = None
    start_unix_ns: int | None = None
    duration_ns: int | None = None


class ProgramFacts(msgspec.Struct, kw_only=True, frozen=True):
    """Settings and counts of the recorded program.

    Attributes:
        torch: settings of torch, such as {"version", "threads", "interop_threads", "float32_matmul_precision",
            "cudnn_allow_tf32", "cudnn_benchmark", "deterministic", "anomaly_detection", "default_dtype"}.
        process: figures of the process and machine, such as {"processors", "usable_processors", "numa_nodes",
            "garbage_collection_ns", "allocator"}.
        environment: variables that matter to speed.
        start: nanoseconds from the process's start, {"torch_imported_ns", "first_step_ns", "recording_ns"}.
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


def to_json(facts: ProgramFacts) -> str:
    """The facts as the JSON text that goes into a trace's header."""
    return msgspec.json.encode(facts).decode()


def from_header(value: Any) -> ProgramFacts | None:
    """The facts in a trace's header; None where there are none or they are damaged."""
    if not isinstance(value, dict):
        return None
    try:
        return msgspec.convert(value, ProgramFacts)
    except (msgspec.ValidationError, RecursionError):
        return None
