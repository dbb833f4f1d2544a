"""Recording in code, in real processes: exact lines, several ranks, forks, compiled code."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import stepscope
from stepscope.analysis.host import TABLES, host_activity
from stepscope.analysis.operators import operator_costs
from stepscope.trace import Trace
from stepscope.trace.nesting import inherit

pytest.importorskip("torch")

REPOSITORY = Path(__file__).resolve().parents[2]

TRUTH = '''
"""Names the caller's line of each call of torch; stands among the site-packages, so it is not the user's."""
import sys
from torch.autograd.profiler import record_function
from torch.overrides import TorchFunctionMode

class Truth(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), named=None):
        frame = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.endswith("gpt2_training.py"):
            frame = frame.f_back
        with record_function(f"LINE {frame.f_lineno if frame else 0}"):
            return function(*arguments, **(named or {}))
'''
TRAINING = """
import sys
import torch
import gpt2_training as training
import stepscope
from truth import Truth

options, steps = {"memory": False, "shapes": False}, 6
schedule = stepscope.schedule(wait=2, warmup=1, active=3, repeat=1)
with stepscope.profile(sys.argv[1], schedule=schedule, **options) as profile, Truth():
    training.train(torch.device("cpu"), training.LOSSES[sys.argv[2]], steps, profile.step)
"""


def environment_of(folder: Path) -> dict[str, str]:
    places = [REPOSITORY / "src", REPOSITORY / "examples", folder / "site-packages"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places)), "OMP_NUM_THREADS": "1"}
    environment.pop("STEPSCOPE_RUN", None)
    return environment


def run(program: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program of its own file in `folder`, which holds what it imports."""
    script = folder / "program.py"
    script.write_text(program)
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment_of(folder), timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def true_lines(trace: Trace) -> pl.Series:
    """Of each operator, the line that TRUTH names; of backward operators, that of their forward by the file's flows."""
    activity = host_activity(trace)
    slices = activity.slices_of("operators")
    named = trace.annotations["name"].str.extract(r"^LINE (\d+)$").cast(pl.Int64).fill_null(-1).to_numpy()
    own = np.full(len(activity.row), -1, np.int64)
    mine = activity.table == TABLES.index("annotations")
    own[mine] = named[activity.row[mine]]
    around = inherit(own, activity.parent)[slices]
    forward = np.full(trace.operators.height, -1, np.int64)
    parent = trace.operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    node = trace.links["target"].to_numpy()
    for part in (node, parent[node]):  # the engine's work around a node is done for it
        forward[part] = trace.links["source"].to_numpy()
    source = inherit(forward, parent)
    return pl.Series(np.where(source >= 0, around[source], around))


def test_lines_of_a_small_gpt2_are_the_true_ones(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "truth.py").write_text(TRUTH)
    path = tmp_path / "trace.json.gz"

    run(TRAINING, str(path), "batched", folder=tmp_path)

    trace = stepscope.open_trace(path)
    backward = trace.operators["forward_thread"].fill_null(0).to_numpy() > 0
    parent = trace.operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    table = pl.DataFrame(
        {
            "is_backward": inherit(np.where(backward, 1, -1), parent) > 0,
            "ns": operator_costs(trace)["host_self_ns"],
            "true": true_lines(trace),
            "found": trace.operators["source_line"].cast(pl.Int64),
        }
    ).filter(pl.col("true") > 0)
    shares = (
        table.group_by("is_backward")
        .agg(share=pl.col("ns").filter(pl.col("true") == pl.col("found")).sum() / pl.col("ns").sum(), calls=pl.len())
        .sort("is_backward")
    )
    assert shares["is_backward"].to_list() == [False, True]
    assert shares["calls"].min() > 300  # type: ignore[operator]
    assert shares["share"].min() >= 0.99  # type: ignore[operator]
    assert table["ns"].sum() >= 0.9 * operator_costs(trace)["host_self_ns"].sum()


DISTRIBUTED = """
import sys
import torch
import torch.distributed as distributed
import stepscope

distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with stepscope.profile(sys.argv[1], schedule=stepscope.schedule(wait=1, active=2, repeat=1)) as profile:
    for _ in range(5):
        for part in range(2):  # gradients of two parts are accumulated
            loss = model(torch.ones(4, 8)).sum()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        profile.step()
distributed.barrier()  # a rank that ends while the other still needs it may abort
distributed.destroy_process_group()
"""


def test_two_ranks_record_the_same_steps(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = tmp_path / "program.py"
    script.write_text(DISTRIBUTED)
    environment = environment_of(tmp_path) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(tmp_path / "traces")], env=environment | {"RANK": str(rank)})
        for rank in range(2)
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]

    for rank in range(2):
        trace = stepscope.open_trace(tmp_path / "traces" / f"rank{rank}" / "trace-1.json.gz")
        assert (trace.metadata.rank, trace.metadata.world_size) == (rank, 2)
        assert trace.annotations["step"].drop_nulls().to_list() == [2, 3]
        forwards = trace.operators.filter(pl.col("name") == "aten::linear")
        assert forwards["source_line"].to_list() == [13] * 4
        backwards = trace.operators.filter(pl.col("name") == "AddmmBackward0")
        assert backwards["source_line"].to_list() == [13] * 4


IN_PROCESSES_AND_THREADS = """
import sys, threading
import torch
from torch.utils.data import DataLoader, Dataset
import stepscope

class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor(float(index))

def beside(batch):
    return batch.exp()

if __name__ == "__main__":
    with stepscope.profile(sys.argv[1], memory=False) as profile:
        for batch in DataLoader(Numbers(), batch_size=4, num_workers=1):
            thread = threading.Thread(target=beside, args=(batch,))
            thread.start()
            thread.join()
            batch.cosh()
            profile.step()
"""


def test_threads_are_recorded_and_worker_processes_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"

    run(IN_PROCESSES_AND_THREADS, str(path), folder=tmp_path)

    operators = stepscope.open_trace(path).operators.filter(pl.col("name").is_in(["aten::exp", "aten::cosh"]))
    assert operators.select("name", "source_line", "source_function").unique().sort("name").rows() == [
        ("aten::cosh", 22, "<module>"),
        ("aten::exp", 14, "beside"),
    ]
    assert operators["lane"].n_unique() >= 2


COMPILED = """
import sys
import torch
import stepscope

compilations = []

def backend(graph, inputs):
    compilations.append(graph)
    return graph.forward

def layer(value):
    return (value @ value).relu()

compiled = torch.compile(layer, backend=backend)
value = torch.ones(4, 4, requires_grad=True)
compiled(value).sum().backward()
with stepscope.profile(sys.argv[1]) as profile:
    for _ in range(2):
        compiled(value).sum().backward()
        profile.step()
compiled(value)
print(len(compilations))
"""


def test_compiled_code_is_not_compiled_again_and_has_the_line_of_its_call(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"

    done = run(COMPILED, str(path), folder=tmp_path)

    assert done.stdout == "1\n"
    trace = stepscope.open_trace(path)
    assert "compiled_lines" in [warning.kind for warning in trace.warnings]
    products = trace.operators.filter(pl.col("name") == "aten::matmul")
    assert set(products["source_function"].to_list()) <= {"layer", "<module>", "backend"}
    assert products["source_line"].null_count() == 0


INTERRUPTED = """
import sys
import torch
import stepscope

with stepscope.profile(sys.argv[1], diagnose=True) as profile:
    for number in range(9):
        torch.ones(3).sum()
        if number == 4:
            raise KeyboardInterrupt
        profile.step()
"""


def test_an_interrupted_program_keeps_and_diagnoses_what_it_saw(tmp_path: Path) -> None:
    script, path = tmp_path / "program.py", tmp_path / "trace.json.gz"
    script.write_text(INTERRUPTED)

    done = subprocess.run(
        [sys.executable, str(script), str(path)], capture_output=True, text=True, env=environment_of(tmp_path)
    )

    assert done.returncode != 0
    assert "KeyboardInterrupt" in done.stderr
    assert "No device was recorded; a step takes" in done.stdout
    assert stepscope.open_trace(path).annotations["step"].drop_nulls().to_list() == [0, 1, 2, 3, 4]
