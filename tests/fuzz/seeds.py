"""Good files to begin with: small ones of the simulated machine, of stepscope's own writers, and written by hand."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stepscope.readers import open_trace
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import MANIFEST, RunFolder
from stepscope.record.telemetry.store import Missing, Sample, Series, TelemetryStore
from stepscope.report.exports.protobuf import perfetto, xspace
from stepscope.trace import program_facts
from stepscope.trace.energy_records import Counter, EnergyRecord, EnergyWindow
from stepscope.trace.line_records import LineRecords, Location, ThreadLines, lines_path, write_lines
from tests.property.documents import EVERY_KIND
from tests.simulator import kineto_bytes, programs
from tests.simulator.allocator import training
from tests.simulator.collective_logs import entry, inspected, write_dumps, write_inspected
from tests.simulator.gaudi import GaudiOptions, gaudi_bytes
from tests.simulator.machine import PROCESS_ID, Machine
from tests.simulator.nsight_systems import write_nsight
from tests.simulator.perfetto import PerfettoOptions, perfetto_bytes
from tests.simulator.rocprof import rocprof_bytes
from tests.simulator.xplane import xplane_bytes
from tests.unit.analysis import test_hardware_counters
from tests.unit.machine import test_devices_own
from tests.unit.predict import test_price_files
from tests.unit.readers import test_side_files
from tests.unit.readers.test_xla_json import profile
from tests.unit.tune import test_sweep_file

REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLES = ("examples/gpt2_per_token_loss_cpu.json.gz", "tests/fixtures/gpt2_batched_loss_cpu.json.gz")
XLA_SAMPLE = "tests/fixtures/jax_training_cpu.xplane.pb.gz"
ORIGIN_NS = 1_700_000_000_000_000_000
MOST_REAL_BYTES = 300_000
EVENTS = 120


@dataclass(frozen=True)
class Case:
    """Some files, by their paths below a folder, and the one that a command is given; "" for the folder itself."""

    files: dict[str, bytes]
    target: str

    def write(self, folder: Path) -> Path:
        """Write the files into a folder, and return what a command is given."""
        for name, data in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return folder / self.target if self.target else folder


def single(name: str, data: bytes | str) -> Case:
    """One file."""
    return Case({name: data.encode() if isinstance(data, str) else data}, name)


def _of_folder(fill: Callable[[Path], object], target: str = "") -> Case:
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder))
        found = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return Case({str(path.relative_to(folder)): path.read_bytes() for path in found}, target)


def machines() -> list[Machine]:
    """Runs of a few steps."""
    return [
        programs.item_every_step(2),
        programs.two_queue_dependency(2),
        programs.PROGRAMS["exposed_all_reduce"](2),  # type: ignore[call-arg]
        programs.PROGRAMS["backward_thread"](2),  # type: ignore[call-arg]
    ]


def _first_events(data: bytes) -> bytes:
    """A trace without the events after the first ones; those that tell names are kept."""
    document = json.loads(data)
    events = document["traceEvents"] if isinstance(document, dict) else document
    about = [event for event in events if event.get("ph") == "M"][:60]
    events[:] = about + [event for event in events if event.get("ph") != "M"][:EVENTS]
    return json.dumps(document).encode()


def _real(pattern: str) -> Iterator[bytes]:
    """Small real traces, where STEPSCOPE_TRACES names a folder of them, unpacked."""
    root = os.environ.get("STEPSCOPE_TRACES")
    for path in sorted(Path(root).rglob(pattern)) if root else ():
        if path.stat().st_size < MOST_REAL_BYTES and "not_a_trace" not in path.parts:
            data = path.read_bytes()
            yield gzip.decompress(data) if path.suffix == ".gz" else data


def _facts() -> dict[str, Any]:
    """Program facts with every field in them."""
    facts = {
        "loaders": [program_facts.LoaderFacts()],
        "input_stages": [program_facts.InputStageFacts()],
        "optimizers": [program_facts.OptimizerFacts()],
        "data_parallel": [program_facts.DataParallelFacts()],
        "model": program_facts.ModelFacts(),
        "compilations": [program_facts.CompilationFacts()] * 2,
        "torch": {"version": "2.13.0", "threads": 4, "float32_matmul_precision": "highest", "recompile_limit": 8},
        "process": {"processors": 8, "garbage_collection_ns": 5_000, "warm_up_ns": 10**6, "allocator": "glibc"},
        "environment": {"OMP_NUM_THREADS": "4"},
        "start": {"torch_imported_ns": 10**9, "first_step_ns": 2 * 10**9, "recording_ns": 3 * 10**9},
        "pauses": [program_facts.PauseFacts()],
        "padding": [program_facts.PaddingFacts()],
        "steps": [program_facts.StepFacts()] * 2,
    }
    return dict(msgspec.to_builtins(facts))


def kineto() -> list[Case]:
    texts = [kineto_bytes(machine) for machine in machines()] + [EVERY_KIND.text]
    texts += [_first_events(gzip.decompress((REPOSITORY / name).read_bytes())) for name in SAMPLES]
    with_facts = json.loads(texts[0])
    with_facts[program_facts.KEY] = _facts()
    texts.append(json.dumps(with_facts).encode())
    texts += [_first_events(text) for text in _real("kineto/*.json*")][:6]
    return [single("trace.json", text) for text in texts]


def chrome() -> list[Case]:
    """Of other tools: pairs, asynchronous ones, flows, counters, a bare list."""
    rows = [{"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "main"}}]
    events: list[dict[str, Any]] = []
    for turn in range(6):
        at = 100 * turn
        for name, begin, end in (("step", 0, 90), ("forward", 5, 40), ("aten::mm", 10, 30)):
            events += [
                {"ph": "B", "name": name, "cat": "cpu_op", "pid": 1, "tid": 2, "ts": at + begin},
                {"ph": "E", "name": name, "cat": "cpu_op", "pid": 1, "tid": 2, "ts": at + end},
            ]
        kernel = {"ph": "X", "name": "gemm", "cat": "kernel", "pid": 0, "tid": 7, "ts": at + 35, "dur": 30}
        around = {"ph": "b", "name": "load", "cat": "async", "id": turn, "pid": 1, "tid": 2, "ts": at}
        events += [kernel, around, around | {"ph": "e", "ts": at + 50}]
        events += [{"ph": "C", "name": "power", "pid": 1, "ts": at, "args": {"w": 200.5}}]
    events.sort(key=lambda event: event["ts"])
    return [single("chrome.json", json.dumps([*rows, *events])), single("c.json", json.dumps({"traceEvents": events}))]


def xla_json() -> list[Case]:
    document = {"displayTimeUnit": "ns", "metadata": {"highres-ticks": True}, "traceEvents": profile()}
    return [single("host.trace.json.gz", gzip.compress(json.dumps(document).encode(), mtime=0))]


def torch_snapshot() -> list[Case]:
    def fill(folder: Path) -> None:
        training().dump(folder / "snapshot.pickle")
        training(history_from_step=1).dump(folder / "old.pickle", protocol=2)

    files = _of_folder(fill).files
    text = json.dumps(training().snapshot())
    return [*(single(name, data) for name, data in files.items()), single("snapshot.json", text)]


def collective_logs() -> list[Case]:
    def fill(folder: Path) -> None:
        write_dumps(folder / "pickles", 3, lambda rank: [entry(number) for number in range(1, 5 - (rank == 2))])
        write_dumps(folder / "json", 2, lambda rank: [entry(1), entry(2, input_sizes=[[rank]])], as_json=True)
        for rank in range(3):
            write_inspected(folder / "inspected" / f"{rank}.log", [inspected(rank, n, ranks=3) for n in range(4)])

    files = _of_folder(fill).files
    kinds = sorted({name.partition("/")[0] for name in files})
    return [Case({name: data for name, data in files.items() if name.startswith(kind)}, kind) for kind in kinds]


def nsight_systems() -> list[Case]:
    return [
        _of_folder(lambda folder, m=machine: write_nsight(m, folder / "a.sqlite"), "a.sqlite")
        for machine in machines()[:3]
    ]


def perfetto_files() -> list[Case]:
    others = [perfetto_bytes(machine) for machine in machines()[:3]]
    others.append(perfetto_bytes(machines()[0], PerfettoOptions(interned=False, shuffle_seed=3)))
    with tempfile.TemporaryDirectory() as folder:
        trace = open_trace(kineto()[0].write(Path(folder)))
        others.append(b"".join(perfetto(trace)))
    return [single("a.pftrace", data) for data in others]


def xplane() -> list[Case]:
    spaces = [xplane_bytes(machine) for machine in machines()]
    spaces += [gzip.decompress((REPOSITORY / XLA_SAMPLE).read_bytes()), *list(_real("*.xplane.pb"))[:3]]
    return [single("h.xplane.pb", space) for space in spaces]


def rocprof() -> list[Case]:
    return [single("a_results.json", rocprof_bytes(machine)) for machine in machines()[:3]]


def gaudi() -> list[Case]:
    styles = (GaudiOptions(), GaudiOptions(flows=True, kineto=True), GaudiOptions(synapse_thread=False))
    return [single("g.json", gaudi_bytes(each, style)) for each, style in zip(machines(), styles, strict=False)]


def foreign() -> list[Case]:
    """What people give in the place of a trace: rocprof's CSV, other tools' files, documents."""
    kernels = (
        '"Kind","Agent_Id","Queue_Id","Kernel_Id","Kernel_Name","Correlation_Id","Start_Timestamp","End_Timestamp"'
    )
    rows = "\n".join(f'"KERNEL_DISPATCH",1,1,{n},"gemm(float*)",{n},{n * 100},{n * 100 + 50}' for n in range(9))
    return [
        single("1_kernel_trace.csv", f"{kernels}\n{rows}\n"),
        single("stats.csv", '"Name","Calls","TotalDurationNs"\n"hipLaunchKernel",12,340\n'),
        single(
            "a.speedscope.json", '{"$schema": "https://www.speedscope.app/file-format-schema.json", "profiles": []}'
        ),
        single("et.json", '{"schema": "1.1.0-chakra.0.0.4", "nodes": [{"id": 1, "name": "x", "ctrl_deps": 0}]}'),
        single("n.ipynb", '{"cells": [{"cell_type": "code", "source": ["a"]}], "nbformat": 4}'),
        single("m.json", "[[1, 2, 3], [[4, 5], [6, 7]]]"),
        single("p.html", "<!doctype html><html><body>report</body></html>"),
        single("report.nsys-rep", b"\x89QDREP\x00\x01" + bytes(range(256))),
    ]


def tensorboard() -> list[Case]:
    def fill(folder: Path) -> None:
        for host, machine in enumerate(machines()[:2]):
            place = folder / f"plugins/profile/2026_01_02/host{host}.xplane.pb"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(xplane_bytes(machine))

    def exported(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as other:
            trace = open_trace(kineto()[0].write(Path(other)))
            place = folder / "plugins/profile/run/localhost.xplane.pb"
            place.parent.mkdir(parents=True)
            place.write_bytes(b"".join(xspace(trace)))

    return [_of_folder(fill), _of_folder(exported)]


def hltv() -> list[Case]:
    data = gaudi_bytes(machines()[0])
    return [
        Case({"a.hltv": data, "b.hltv.gz": gzip.compress(gaudi_bytes(machines()[1]), mtime=0)}, ""),
        single("a.hltv", data),
    ]


def ranks() -> list[Case]:
    """A folder with a trace a rank."""
    files = {}
    for rank in range(2):
        document = json.loads(kineto_bytes(machines()[2]))
        document["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 2}
        files[f"rank{rank}.json"] = json.dumps(document).encode()
    return [Case(files, "")]


def lines() -> list[Case]:
    """A trace with the lines of a recording beside it."""
    document = json.loads(kineto_bytes(machines()[0]))
    document["baseTimeNanoseconds"] = ORIGIN_NS
    threads = sorted({event["tid"] for event in document["traceEvents"] if event.get("cat") == "cpu_op"})
    times = array("q", [ORIGIN_NS + 20_000 * number for number in range(40)]).tobytes()
    places = array("i", [number % 4 - 1 for number in range(40)]).tobytes()
    records = LineRecords(
        process=PROCESS_ID,
        start_unix_ns=ORIGIN_NS,
        end_unix_ns=ORIGIN_NS + 10**7,
        locations=[Location("/home/alice/train.py", line, "step") for line in (3, 9, 12)],
        threads=[ThreadLines(thread, times, places, times, places) for thread in threads],
        modules=["Net", "Net.body", "Net.body.0"],
    )

    def fill(folder: Path) -> None:
        (folder / "trace.json").write_text(json.dumps(document))
        write_lines(records, folder / "trace.json")
        assert lines_path(folder / "trace.json").is_file()

    sealed = _of_folder(fill, "trace.json")
    bare = {"trace.json.lines": msgspec.msgpack.encode(records)}  # as the first versions wrote it, without a checksum
    return [sealed, *[Case(sealed.files | bare, sealed.target)] * 4]


def store() -> list[Case]:
    def fill(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as other:
            open_trace(kineto()[4].write(Path(other))).save(folder / "saved")

    return [_of_folder(fill, "saved")]


def run_folder() -> list[Case]:
    counter, window = Counter("gpu", "0", "counter"), EnergyWindow(3, 2, 10**6, {"gpu 0": 3.5})
    energy = EnergyRecord("h", [counter], [window], []).to_json()

    def fill(folder: Path) -> None:
        manifest = RunManifest(
            command=("python", "train.py"),
            folder="/home/alice",
            started_unix_s=1.7e9,
            git={"commit": "a" * 40, "dirty": False},
            versions={"torch": "2.13.0"},
        )
        times = [
            {"first_step": 6, "recorded": True, "ns": [10**6] * 5},
            {"first_step": 11, "recorded": False, "ns": [9**6] * 9},
        ]
        run = RunFolder.create(folder, "run-1", manifest)
        for rank in range(2):
            left = {"rank": rank, "world_size": 2, "steps": 5, "problem": None, "step_times": times, "energy": energy}
            left["trace"] = "trace-1.json.gz"
            place = run.rank_folder(rank)
            (place / "recording-7.json").write_text(json.dumps(left))
            (place / "trace-1.json.gz").write_bytes(gzip.compress(kineto_bytes(machines()[2]), mtime=0))
            applied = {"flag": "fuse-optimizer", "sentence": "fused", "applied": True, "ranks": [0]}
            (place / "applied-7.json").write_text(json.dumps({"applied": [applied], "not_applied": []}))
            steps = {"process": 7, "machine": "h", "world_size": 2, "source": "optimizer", "clock": "host"}
            steps |= {
                "complete": True,
                "ends_ns": [1, 20, 300, 4000],
                "own_profiler": False,
                "said": [],
                "losses": [1.5],
            }
            (place / "steps-7.json").write_text(json.dumps(steps))
        (run.rank_folder(0) / "telemetry").mkdir()
        _telemetry(run.rank_folder(0) / "telemetry/7.sqlite")
        run.write_manifest(manifest.ended(manifest.started_unix_s + 60, 0, [left]))
        content = json.loads((run.path / MANIFEST).read_text())
        (run.path / MANIFEST).write_text(json.dumps(content | {"applied": [applied]}))

    return [_of_folder(fill, "run-1")]


def _telemetry(path: Path) -> None:
    made = TelemetryStore(path, {"rank": "0", "process": "7"})
    loss, power = Series("log", "loss"), Series("device", "power_w", "0", "W")
    samples = [
        Sample(series, ORIGIN_NS + step * 10**6, step, 3.0 / (step + 1))
        for step in range(9)
        for series in (loss, power)
    ]
    made.append(samples, [Missing(power, "no driver", 2)])
    made.close()


def telemetry() -> list[Case]:
    return [_of_folder(lambda folder: _telemetry(folder / "telemetry.sqlite"), "telemetry.sqlite")]


def ncu() -> list[Case]:
    return [single("ncu.csv", text) for text in (test_hardware_counters.DETAILS, test_hardware_counters.RAW)]


def xla_metrics() -> list[Case]:
    return [single("report.txt", test_side_files.REPORT)]


def xla_debug_log() -> list[Case]:
    kinds = (
        ("Compilation", "user mark_step"),
        ("Execution", "user mark_step"),
        ("Execution", "mark_step in parallel loader"),
    )
    blocks = [test_side_files.BLOCK.format(kind, why) + test_side_files.FRAMES.format(kind) for kind, why in kinds]
    return [single("debug.log", test_side_files.POST.join(["loss 3.1\n", *blocks]))]


def gaudi_metrics() -> list[Case]:
    return [single(f"metrics{end}.json", f"[{test_side_files.METRICS}]") for end in ("", "-rank0")]


def fallback_log() -> list[Case]:
    text = "CPU fallback digamma : self=HPUFloatType\nCPU fallback aten::nonzero : self=HPUBoolType\n"
    text += "Frequency of op and op name that were executed on CPU:\n12\taten::digamma\n1       aten::median\ndone\n"
    return [single("fallback.log", f"loss 1\n[10:00:01.1][PT_FALLBACK][info ][tid:7] {text}")]


def prices() -> list[Case]:
    info = test_price_files.INFO
    return [
        single("sky.csv", f"{test_price_files.SKYPILOT}p3,V100,4.0,32.0,244.0,12.24,us-east-1,{info},4.5\n"),
        single("hunt.csv", f"{test_price_files.GPUHUNT}a2,us-central1-a,3.67,12,85,1,A100,40,False,gcp\n"),
        single(
            "deepview.json",
            '[{"name": "gcp", "pue": 1.1, "instances": [{"name": "n1", "gpu": "v100", "vcpus": 4, "ram": 26,'
            ' "ngpus": 1, "cost": 2.72, "regions": ["us-central1", "asia-east1"]}]}]',
        ),
    ]


def devices() -> list[Case]:
    return [single("card.toml", test_devices_own.CARD)]


def sweep() -> list[Case]:
    import yaml

    texts = (test_sweep_file.OWN, test_sweep_file.WANDB)
    return [single("sweep.yaml", text) for text in (*texts, *(json.dumps(yaml.safe_load(text)) for text in texts))]
