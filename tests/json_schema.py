"""The JSON Schema of what commands write as JSON, docs/schema/stepscope-1.json, made from the types of its content.

The keys of a document are a `TypedDict` here. What lies below comes from the package: its dataclasses, and the columns
of its tables.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_type_hints

import msgspec
import polars as pl
from typing_extensions import NotRequired, TypedDict

import stepscope
from stepscope.analysis import batch_size, desync, memory, stragglers
from stepscope.analysis.allocator import FIT_SCHEMA
from stepscope.analysis.captured import GraphUse
from stepscope.analysis.device_time import DeviceUse, EngineUse, HostUse
from stepscope.analysis.places import LINE_SCHEMA, MODULE_SCHEMA, PlaceCosts
from stepscope.analysis.serving import ServingSummary
from stepscope.commands.machine import Hits
from stepscope.compare import bench, history
from stepscope.compare import job as compared_job
from stepscope.compare.comparison import Comparison, compare_traces
from stepscope.compare.statistics import SampleComparison
from stepscope.compare.trace_record import SideSummary
from stepscope.diagnosis import diagnosis, finding, job
from stepscope.diagnosis.rank_groups import EXCHANGE_SCHEMA
from stepscope.diagnosis.recording_costs import Contention
from stepscope.diagnosis.rules.graph_break import CompileUse
from stepscope.machine.observed import Observation
from stepscope.predict import limits, prediction, scaling, serving
from stepscope.predict.batch import MemoryNeed
from stepscope.predict.cost import energy_parts, plan
from stepscope.predict.data_parallel_settings import BucketSize, Reason, SettingsFromTrace
from stepscope.record import watch_log
from stepscope.record.apply.flags import Outcome
from stepscope.remedies.settings import DataParallelSettings
from stepscope.report.bench import BATCH_SCHEMA
from stepscope.report.document import SCHEMA, Prose
from stepscope.trace.metadata import Metadata, RunCounts, TraceWarning
from stepscope.tune import trials
from stepscope.tune.sweep import file as sweep_file
from stepscope.tune.sweep import run as sweep
from stepscope.tune.sweep.parameters import Parameter
from stepscope.whatif import answer, critical_path
from stepscope.whatif.job import JobProspect, RankProspect
from tests.published_schema import ADDRESS

REPOSITORY: Final = Path(__file__).resolve().parents[1]
SLOW: Final = REPOSITORY / "examples" / "gpt2_per_token_loss_cpu.json.gz"
FAST: Final = REPOSITORY / "tests" / "fixtures" / "gpt2_batched_loss_cpu.json.gz"


def _part(source: type, *names: str, called: str = "") -> Any:
    """Fields and properties of a class by name; by default all its fields."""
    hints = get_type_hints(source, localns={"Unreadable": finding.Unreadable})  # not imported where it is only a type
    names = names or tuple(field.name for field in dataclasses.fields(source))
    types = {name: hints.get(name) or get_type_hints(vars(source)[name].fget)["return"] for name in names}
    return TypedDict(called or source.__name__, types)


def _rows(columns: Mapping[str, Any]) -> Any:
    """The rows of a table; any value but those of its keys may be null."""
    items = {"type": "object", "properties": {name: _value(kind) for name, kind in columns.items()}}
    return Annotated[list[dict[str, Any]], msgspec.Meta(extra_json_schema={"items": {**items, "required": [*columns]}})]


def _value(kind: Any) -> dict[str, Any]:
    if isinstance(kind, pl.List):
        return {"type": ["array", "null"], "items": _value(kind.inner)}
    name = "integer" if kind.is_integer() else "number" if kind.is_numeric() else "string"
    return {"type": ["boolean" if kind == pl.Boolean else name, "null"]}


# Tables whose columns are nowhere written down: those of the sample are those of every trace.
_DIAGNOSED: Final = diagnosis.diagnose(stepscope.open_trace(SLOW))
_COMPARED: Final = compare_traces(stepscope.open_trace(SLOW), stepscope.open_trace(FAST))
_REMEMBERED: Final = memory.memory_summary(
    stepscope.open_trace(SLOW), next(iter(memory.device_memories(stepscope.open_trace(SLOW))))
)


class Document(TypedDict):
    schema: Literal[1]
    stepscope: str


class TraceFacts(_part(Metadata, "path", "format", "events", "rank", "world_size", "origin_unix_ns", "host", "window")):
    warnings: list[TraceWarning]
    evidence: NotRequired[_part(RunCounts, *(each for each in RunCounts.__match_args__ if each != "compiled"))]


class Finding(
    _part(
        finding.Finding,
        *("rule", "title", "severity", "saving_ns_per_step", "saving_share", "saving_basis", "saving_from"),
        *("confidence", "ends_run_in_ns", "evidence", "where", "remedy"),
    )
):
    __doc__ = finding.Finding.__doc__


class UseOfDevice(
    _part(DeviceUse), _part(DeviceUse, "device_ratio", "device_host_ratio", "low_precision_ratio", "host_overlap")
):
    pass


class Summary(TypedDict):
    devices: list[UseOfDevice]
    host: HostUse | None
    engines: NotRequired[list[EngineUse]]


class Steps(TypedDict):
    source: Literal["annotation", "inferred", "none"]
    step_ns: int
    unrecorded_ns: int | None
    job_step_ns: int | None
    count: int
    typical_ns: int
    mean_ns: int
    median_ns: int
    set_apart: list[finding.SetApart]
    list: _rows(_DIAGNOSED.steps.schema)


class Accounting(_part(finding.StepTime, "device", "window", "window_ns", "busy_ns", "backlog_ns")):
    idle: _rows({name: kind for name, kind in _DIAGNOSED.idle.schema.items() if name != "device"})


class DisturbedSteps(_part(Contention)):
    calm_step_ns: int
    sentence: str


class EnergyPart(_part(energy_parts.EnergyPart, "kind", "name", "ns")):
    joules: tuple[float, float]


class DeviceEnergy(
    _part(energy_parts.DeviceEnergy, "device", "name", "basis", "how", "step_ns", "idle_share", "window_joules")
):
    joules: tuple[float, float] | None
    idle_watts: list[float] | None
    busy_watts: list[float] | None
    parts: list[EnergyPart]
    operators: list[EnergyPart]


class HostEnergy(_part(energy_parts.HostEnergy, "kind", "device", "basis", "how", "step_ns", "window_joules")):
    joules: float
    parts: list[EnergyPart]


class FindingEnergy(_part(energy_parts.FindingEnergy, "rule", "title", "saving_ns", "busy_ns")):
    joules: tuple[float, float]


class TraceEnergy(
    _part(
        energy_parts.TraceEnergy,
        *("path", "format", "rank", "step_ns", "step_count", "stepped", "missing", "warnings"),
    )
):
    devices: list[DeviceEnergy]
    hosts: list[HostEnergy]
    findings: list[FindingEnergy]


class Diagnosis(
    Document,
    _part(
        diagnosis.Diagnosis,
        *(
            "devices",
            "once",
            "together",
            "afterwards",
            "lines",
            "busy",
            "not_answered",
            "operator_count",
            "kernel_count",
        ),
    ),
):
    """The diagnosis of one trace; of several, `Ranks`."""

    headline: str
    trace: TraceFacts
    summary: Summary
    steps: Steps
    accounting: list[Accounting]
    idle: _rows(_DIAGNOSED.idle.schema)
    host: _rows(_DIAGNOSED.host.schema)
    operators: _rows(_DIAGNOSED.operators.schema)
    kernels: _rows(_DIAGNOSED.kernels.schema)
    findings: list[Finding]
    findings_hidden: int
    program: NotRequired[str]
    contention: NotRequired[DisturbedSteps]
    compile: NotRequired[CompileUse]
    graphs: NotRequired[GraphUse]
    serving: NotRequired[ServingSummary]
    applied: NotRequired[list[str]]
    energy: NotRequired[TraceEnergy]
    unreadable: NotRequired[list[finding.Unreadable]]


class RankClock(TypedDict):
    rank: str
    ahead_ns: int
    drift: float
    error_ns: int


class JobSteps(
    _part(
        job.JobSteps,
        "step_ns",
        "last",
        "ranks",
        "missing",
        "error_share",
        "wait_ns",
        "transfer_ns",
        "apart",
        "absent",
        "open_ns",
        "least_open_ns",
    )
):
    parts: _rows(job.PART_SCHEMA)
    holders: _rows(job.HOLDER_SCHEMA)


class Ranks(Document):
    """`stepscope diagnose` of several traces."""

    job_steps: JobSteps | None
    ranks: list[Diagnosis]
    across_ranks: list[Finding]
    exchanges: _rows(EXCHANGE_SCHEMA)
    clocks: list[RankClock]
    unreadable: list[finding.Unreadable]


_COSTS: Final = ("basis", "steps", "total_ns", "attributed_ns", "idle_ns")


class Lines(Document, _part(PlaceCosts, *_COSTS)):
    """`stepscope lines`."""

    trace: str
    line_count: int
    lines: _rows(LINE_SCHEMA)


class Modules(Document, _part(PlaceCosts, *_COSTS)):
    """`stepscope modules`."""

    trace: str
    module_count: int
    modules: _rows(MODULE_SCHEMA)


class Side(
    _part(
        SideSummary,
        *("name", "paths", "ranks", "runs", "basis", "devices", "step_source", "step_count", "total_ns", "step_ns"),
        *("left_out", "warnings"),
    )
):
    pass


class Samples(_part(SampleComparison)):
    is_unprofiled: bool


class TwoJobs(TypedDict):
    before: JobSteps
    after: JobSteps
    path: _rows(compared_job.PATH_SCHEMA)
    ranks: _rows(compared_job.RANK_SCHEMA)


class TwoSides(_part(Comparison, "basis", "difference_ns", "notes", "energies"), _part(SampleComparison, "verdict")):
    before: Side
    after: Side
    job: TwoJobs | None
    sentences: list[str]
    samples: Samples
    causes: _rows(_COMPARED.causes.schema)
    causes_count: int
    lines: _rows(_COMPARED.lines.schema)
    lines_count: int
    operators: _rows(_COMPARED.operators.schema)
    operators_count: int
    kernels: _rows(_COMPARED.kernels.schema)
    kernels_count: int
    kernel_changes: _rows(_COMPARED.kernel_changes.schema)
    kernel_changes_count: int
    modules: _rows(_COMPARED.modules.schema)
    modules_count: int
    communication: _rows(_COMPARED.communication.schema)
    communication_count: int
    memory: _rows(_COMPARED.memory.schema)
    memory_count: int
    settings: _rows(_COMPARED.settings.schema)
    settings_count: int


class Compare(Document):
    """`stepscope compare`: one comparison for each side after the first."""

    comparisons: list[TwoSides]


class Difference(TypedDict):
    name: str
    before: str | None
    after: str | None


class Change(_part(history.Change)):
    run: str
    differences: list[Difference]


class RunLeftOut(_part(history.LeftOut)):
    pass


class RunSeries(_part(history.RunSeries)):
    changes: list[Change]
    left_out: list[RunLeftOut]


class History(Document):
    """`stepscope history`."""

    series: list[RunSeries]
    left_out: list[RunLeftOut]


class MemoryTrends(TypedDict):
    memory: float | None
    device_memory: float | None


class Watch(Document):
    """A line of `stepscope watch --json`: the latest recording of a job."""

    recording: watch_log.Watched
    cost_share: float | None
    growth_bytes_per_hour: MemoryTrends


class WatchAlert(Document):
    """What a webhook and a command of `stepscope watch` get."""

    job: str
    unix_s: float
    alert: str
    state: Literal["firing", "recovered"]
    value: float
    limit: float | None
    sentence: str
    before: float | None
    growth: str | None


class ReplayedSteps(TypedDict):
    source: Literal["recorded", "none"]
    count: int


class TraceName(TypedDict):
    path: str
    format: str
    warnings: list[TraceWarning]


class Prospect(_part(answer.Prospect, "step_ns", "saving_ns", "saving_share")):
    change: str


class Whatif(
    Document,
    _part(answer.AsMeasured, "step_ns", "replayed_step_ns", "device", "unexplained_share", "why_not"),
    _part(answer.Answer, "contended_share"),
):
    """`stepscope whatif`."""

    trace: TraceName
    steps: ReplayedSteps
    resources: _rows(critical_path.RESOURCE_SCHEMA)
    causes: _rows(answer.CAUSE_SCHEMA) | None
    changes: list[Prospect]
    together: Prospect | None
    ranks: list[RankProspect]
    job: (
        _part(JobProspect, "measured_step_ns", "step_ns", "saving_share", "last", "last_then", "changed", "error_share")
        | None
    )
    job_steps: NotRequired[JobSteps]
    resources_then: _rows(critical_path.RESOURCE_SCHEMA) | None
    critical_path: _rows(critical_path.PATH_SCHEMA) | None
    slack: _rows(critical_path.SLACK_SCHEMA) | None
    curve: _rows(answer.CURVE_SCHEMA) | None
    sentences: list[Prose]


class Prediction(
    _part(
        prediction.StepPrediction,
        *("step_ns", "low_ns", "high_ns", "speed_up", "samples_per_s", "device_ns", "busy_share", "host_ns"),
        *("limit", "limit_share", "limit_cause", "memory_bytes", "fits", "notes", "knowledge", "phases"),
    )
):
    device: str
    device_memory_bytes: int | None
    bases: dict[str, float]


class Scaling(TypedDict):
    device: str | None
    link: _part(limits.Link, "name", "bandwidth_bytes_s", "fitted", "error", "source") | None
    steps: list[scaling.ScaledStep]


class Predict(
    Document,
    _part(
        prediction.PredictedSteps,
        *("device", "devices", "busy_share", "from_shapes", "why_not", "precision", "batch", "recorded_batch"),
    ),
):
    """`stepscope predict`."""

    trace: TraceName
    steps: ReplayedSteps
    step_ns: float
    steady_step_ns: float
    memory: MemoryNeed
    range_holds: float | None
    predictions: list[Prediction]
    unreadable: list[finding.Unreadable]
    sentences: list[Prose]
    scaling: NotRequired[list[Scaling]]


class ServedModel(_part(serving.ModelShape, "parameters", "layers", "experts", "weights")):
    path: str


class ServedOn(
    _part(
        serving.ServingPrediction,
        *("fits", "most_requests", "weight_bytes", "cache_bytes", "prefill", "decode", "tokens_per_s", "notes"),
    )
):
    device: str
    link: str | None


class Serving(Document):
    """`stepscope serving`."""

    model: ServedModel
    request: serving.ServingRequest
    servings: list[ServedOn]
    sentences: list[Prose]


class PlannedTrace(_part(prediction.PredictedSteps, "path", "format", "device", "why_not", "warnings")):
    step_ns: float
    steps: int
    devices: int
    batch_size: int | None
    memory_bytes: int | None


class Asked(_part(plan.Request, "iterations", "spot", "deadline_h", "budget_usd")):
    gpus: list[int] | None
    link: str | None
    precision: str | None
    batch_size: int | None


class Machine(
    _part(
        plan.Machine,
        *("hours", "hours_low", "hours_high", "usd", "usd_low", "usd_high", "usd_h"),
        *("steps", "step_ns", "step_low_ns", "step_high_ns", "limit", "on_front"),
    ),
    _part(plan.Price, "provider", "instance", "region"),
    _part(prediction.StepPrediction, "fits", "knowledge"),
):
    device: str
    devices: int
    meets: bool
    price_as_of: str
    price_age_days: int
    price_is_old: bool
    price_source: str
    scaling: (
        _part(
            scaling.ScaledStep,
            "efficiency",
            "communication_ns",
            "exposed_ns",
            "straggler_ns",
            called="ScalingOfMachine",
        )
        | None
    )
    estimated_kwh: tuple[float, float] | None
    estimated_kg_co2: tuple[float, float] | None
    notes: list[str]


class Plan(Document, _part(plan.Plan, "without_price", "notes")):
    """`stepscope plan`: times in nanoseconds and hours, prices in US dollars."""

    trace: PlannedTrace
    asked: Asked
    today: str
    recommendation: list[str]
    sentences: list[Prose]
    machines: list[Machine]
    left_out: list[plan.Refused]
    unreadable: list[finding.Unreadable]


class Peak(TypedDict):
    start_ns: int
    bytes: int
    step: int | None


class Contradiction(TypedDict):
    allocated_bytes: int
    reserved_bytes: int


class Growth(TypedDict):
    bytes_per_step: int
    slope_bytes: float
    level_bytes: list[int]
    accumulated: _rows(memory.ACCUMULATED_SCHEMA)


class MemoryOfDevice(_part(memory.DeviceMemory, "device", "capacity_bytes", "reserved_bytes")):
    peak: Peak
    contradiction: Contradiction | None
    unused_reserved_bytes: int | None
    unused_reserved_share: float | None
    growth: Growth | None
    name: str | None
    categories: _rows(_REMEMBERED.categories.schema)
    lines: _rows(_REMEMBERED.lines.schema)
    modules: _rows(_REMEMBERED.modules.schema)
    operators: _rows(_REMEMBERED.operators.schema)
    allocator: _rows(_REMEMBERED.allocator.schema)
    out_of_memory: _rows(_REMEMBERED.failures.schema)


class Memory(Document):
    """`stepscope memory`."""

    devices: list[MemoryOfDevice]


class FitOfDevice(_part(memory.DeviceMemory, "device", "capacity_bytes", "peak_bytes", "reserved_bytes")):
    limit_bytes: int | None
    changes: _rows(FIT_SCHEMA)


class Fit(Document):
    """`stepscope memory --fit`."""

    devices: list[FitOfDevice]


class TotalEnergy(TypedDict):
    joules: tuple[float, float] | None
    is_estimate: bool
    unknown_devices: list[str]


class Equivalence(TypedDict):
    value: tuple[float, float]
    unit: str
    source: str


class RunEnergy(TypedDict):
    iterations: float
    asked: bool
    pue: float
    joules: tuple[float, float] | None
    kwh: tuple[float, float] | None
    kilograms: tuple[float, float] | None
    equivalences: list[Equivalence]


class Carbon(_part(energy_parts.Grid)):
    source: str


class Energy(Document):
    """`stepscope energy`."""

    traces: list[TraceEnergy]
    total: TotalEnergy
    run: RunEnergy
    sentences: list[Prose]
    carbon: Carbon | None


class BenchRun(
    _part(bench.BenchRun, "round", "step_ns", "source", "clock", "ranks", "complete", "seconds", "other_cores")
):
    dropped: int
    steady: bool
    applied: list[Outcome]


class BenchCommand(TypedDict):
    label: str
    command: str
    apply: list[str]
    runs: list[BenchRun]


class BenchComparison(_part(SampleComparison)):
    label: str


class Bench(Document, _part(bench.Bench, "stop", "seconds", "settings")):
    """`stepscope bench`."""

    folder: str
    failure: _part(bench.BenchFailure, "label", "round", "sentence") | None
    rounds: int
    warm_up: str
    commands: list[BenchCommand]
    comparisons: list[BenchComparison]
    profile: Compare | None


class BatchSize(
    Document,
    _part(batch_size.BatchModel, "time", "memory", "capacity_bytes", "kept_free", "largest_batch", "problems"),
):
    """`stepscope batch-size --format json`."""

    measurements: _rows(BATCH_SCHEMA)
    samples_per_second_limit: float | None
    verdict: list[str]


class Bucket(_part(BucketSize, "messages", "communication_ns", "exposed_ns")):
    bucket_cap_mb: int | None


class DataParallel(_part(SettingsFromTrace, "step_ns", "ranks", "recorded_ranks", "latency_ns", "bandwidth_bytes_s")):
    """`stepscope data-parallel`, which `DataParallelSettings.load` reads, without settings that stay torch's."""

    schema: int
    settings: DataParallelSettings
    reasons: dict[str, _part(Reason, "why", "known")]
    sizes: list[Bucket]


class Trial(_part(trials.Trial, "number", "state", "reason", "machine", "folder"), _part(trials.Proposal, "purpose")):
    configuration: dict[str, str]
    reference: dict[str, str]
    outcome: str
    measured: trials.Measured | None


class SettingRemedy(_part(trials.Knob, "source", "why")):
    setting: str
    code: str
    diff: str


class Best(TypedDict):
    settings: dict[str, str]
    apply: list[str]
    arguments: list[str]
    variables: dict[str, str]
    command_line: str
    remedies: list[SettingRemedy]


class Tune(Document):
    """`stepscope tune`."""

    command: list[str]
    outcome: str
    is_proven: bool
    best: Best | None
    proof: Trial | None
    stop: Literal["done", "budget", "interrupted"]
    seconds: float
    space: trials.Space
    trials: list[Trial]
    how: list[str]


class SweepParameter(_part(Parameter)):
    values: list[Any] | None
    probabilities: list[float] | None
    mu: float | None
    sigma: float | None
    a: float | None
    b: float | None


class Effect(_part(sweep.Effect, "importance", "correlation", "trials")):
    parameter: str


class Sweep(Document, _part(sweep_file.Sweep, "name", "method", "metric", "warnings")):
    """`stepscope sweep`."""

    command: str
    program: str | None
    parameters: list[SweepParameter]
    asked_trials: int | None
    counts: dict[str, int]
    best: sweep.SweepTrial | None
    effects: list[Effect]
    trials: list[sweep.SweepTrial]


class Observations(Document):
    """`stepscope environment --format json` and `stepscope doctor --format json`."""

    observations: list[Observation]


class CacheEntry(TypedDict):
    kind: str
    key: str
    bytes: int
    made_unix_s: float | None
    used_unix_s: float | None


class Cache(TypedDict):
    kind: str
    folder: str
    said_by: str
    limit_bytes: int | None
    bytes: int
    entries: list[CacheEntry]


class Caches(Document):
    """`stepscope cache compile show --json`."""

    caches: list[Cache]
    hit_counts: list[_part(Hits, *Hits._fields)]


class SlowWorkers(
    _part(stragglers.Stragglers, "steps", "slowdown", "shares", "workers", "types", "correlation", "spread")
):
    path: str
    headline: str
    step_ns: int
    usual_ns: int
    not_logged_ns: int
    causes: list[str]
    saved_ns: dict[str, int]
    gpus_of_worker: int | None
    slowest: list[tuple[int, int]]
    last_stage_ratio: float


class Job(Document):
    """`stepscope diagnose` of a job's log of operations."""

    job: SlowWorkers


class DifferentCalls(_part(desync.Mismatch, "group", "number", "name")):
    differs: str
    ranks: dict[str, list[str]]
    where: dict[str, str]


class CallOfRank(TypedDict):
    rank: str
    name: str
    where: str


class UnfinishedCall(_part(desync.Unfinished, "group", "number", "name", "is_cause")):
    waiting: list[str]
    missing: list[str]
    not_started: list[str]
    unlogged_ranks: list[int] | None
    calls: list[CallOfRank]
    since_unix_ns: int | None
    waited_ns_at_least: int | None


class SlowGroup(TypedDict):
    kind: str
    bytes: int
    group: str
    bus_gb_per_s: float
    median_gb_per_s: float


class LoggedRank(TypedDict):
    rank: str
    host: NotRequired[str]
    calls: int
    last_call: str
    times_last: NotRequired[int | None]
    late_ns: NotRequired[int | None]
    waits_ns: NotRequired[int | None]


class LoggedCollectives(TypedDict):
    path: str
    headline: str
    kinds: list[str]
    causes: list[str]
    mismatches: list[DifferentCalls]
    unfinished: list[UnfinishedCall]
    advice: list[str]
    ranks: list[LoggedRank]
    exchanges: _rows(desync.RATE_SCHEMA)
    slow_groups: list[SlowGroup]
    unreadable: list[finding.Unreadable]


class Collectives(Document):
    """`stepscope diagnose` of logs of collectives; beside traces the same stands in their report."""

    collectives: LoggedCollectives


DOCUMENTS: Final = (
    *(Diagnosis, Ranks, Job, Collectives, Lines, Modules, Whatif, Compare, History, Memory, Fit, Energy, Predict, Plan),
    *(Serving, Bench, BatchSize, DataParallel, Tune, Sweep, Observations, Caches, Watch, WatchAlert),
)


def json_schema() -> dict[str, Any]:
    """The schema: any of the documents, each with a definition of its name."""
    _, found = msgspec.json.schema_components(DOCUMENTS, ref_template="#/$defs/{name}")
    for each in found.values():
        if "description" in each:
            each["description"] = inspect.cleandoc(each["description"])
        for name, value in each.get("properties", {}).items():
            if "default" in value:  # written all the same
                del value["default"]
                each.setdefault("required", []).append(name)
    return {
        "$schema": ADDRESS,
        "title": f"What stepscope writes as JSON, schema {SCHEMA}",
        "anyOf": [{"$ref": f"#/$defs/{each.__name__}"} for each in DOCUMENTS],
        "$defs": dict(sorted(found.items())),
    }


def published() -> str:
    """The text of the file."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"
