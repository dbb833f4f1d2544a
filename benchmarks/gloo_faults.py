"""Faults of real ranks: gloo processes of this machine train, one of them held up; is it named, with the cause?

Two, four or eight processes, one thread each, record three steps with PyTorch's profiler. The fault is drawn to one
rank: its loader waits, it computes a second model, or it saves a checkpoint in each step. The clean twin has none. Many
processes share the processors of a machine, so that ranks do wait for each other there, also without a fault.

    python benchmarks/gloo_faults.py 2 4 8
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from stepscope.diagnosis.rank_summary import rank_record
from stepscope.diagnosis.ranks import across_ranks
from stepscope.diagnosis.view import View
from stepscope.readers import open_trace

FAULTS: Final = {"loader": "loading data", "more work": "computed|pieces", "checkpoint": "checkpoint"}
STEPS: Final = 3


def worker(rank: int, ranks: int, folder: Path, fault: str, late: int) -> None:
    """One rank of the training."""
    import torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, profile, schedule
    from torch.utils.data import DataLoader, Dataset

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    is_late = rank == late

    class Batches(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> torch.Tensor:
            if is_late and fault == "loader":
                time.sleep(0.08)
            return torch.randn(64, 256)

    layers = [nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 256)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    second = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 256))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    steps = schedule(wait=1, warmup=2, active=STEPS)

    def write(done: profile) -> None:
        done.export_chrome_trace(f"{folder}/rank{rank}.json")

    with profile(activities=[ProfilerActivity.CPU], with_stack=True, schedule=steps, on_trace_ready=write) as running:
        for number, batch in enumerate(DataLoader(Batches(), batch_size=None)):
            if number == 3 + STEPS:
                break
            loss = model(batch).square().mean()
            if is_late and fault == "more work":
                for _ in range(6):
                    loss = loss + 1e-9 * second(batch).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if is_late and fault == "checkpoint":
                torch.save({"model": [second.state_dict()] * 6, "at": number}, f"{folder}/checkpoint.pt")
            running.step()
    distributed.destroy_process_group()


def findings(ranks: int, fault: str, late: int) -> list[str]:
    """Titles of the findings across the ranks of one training."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen([sys.executable, __file__, "--rank", str(rank), "--of", str(ranks), "--folder", folder,
                              "--fault", fault, "--late", str(late)],
                             env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
            for rank in range(ranks)
        ]  # fmt: skip
        assert [each.wait(300) for each in processes] == [0] * ranks
        records = [rank_record(View(open_trace(Path(folder) / f"rank{rank}.json"))) for rank in range(ranks)]
        return [finding.title for finding in across_ranks(records)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", metavar="RANKS", type=int, nargs="*", default=[2])
    parser.add_argument("--seed", type=int, default=0)
    for name, kind in (("rank", int), ("of", int), ("folder", Path), ("fault", str), ("late", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        worker(options.rank, options.of, options.folder, options.fault, options.late)
        return
    chance = random.Random(options.seed)
    for ranks in options.ranks:
        for fault, words in FAULTS.items():
            late = chance.randrange(ranks)
            found, clean = findings(ranks, fault, late), findings(ranks, "", late)
            is_told = bool(found and re.search(rf"rank {late}\b.*(?:{words})", found[0]))
            print(f"{ranks} ranks, {fault} on rank {late}: {'found' if is_told else 'MISSED'}: {found[:1]}", flush=True)
            print(f"    clean twin: {clean or 'silent'}", flush=True)


if __name__ == "__main__":
    main()
