"""Time a program's steps without a profiler, from the end of one optimizer step, or round of requests, to the next.

python -m tests.zoo.timing per_token_loss --fault
python -m tests.zoo.timing examples/naive_gpt2.py --batched-loss

The last line printed is a JSON list of the steps' nanoseconds, of rank 0 where there are several.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from itertools import pairwise
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.zoo import command


def main() -> None:
    """Run the program of the zoo, or the file, that the first argument names, with the other arguments."""
    name, *arguments = sys.argv[1:]
    ends: list[int] = []

    def note(*_: Any) -> None:
        ends.append(time.perf_counter_ns())

    register_optimizer_step_post_hook(note)
    command.AFTER_A_ROUND.append(note)
    sys.argv = [name, *arguments]
    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
    else:
        runpy.run_module(f"tests.zoo.{name}", run_name="__main__", alter_sys=True)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps([end - begin for begin, end in pairwise(ends)]))


if __name__ == "__main__":
    main()
