"""Run one program: the steps, marked for stepscope, and their times by the device's clock.

`--timed 20 --times FILE` writes a JSON list of the nanoseconds of 20 steps, timed after WARM_UP and before a recording
that skips the first WARM_UP + 20 + BEFORE_RECORDING steps: no profiler has run yet.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path

import torch

import stepscope
from tests.zoo import command
from tests.zoo.gpu.registry import FAULTS, WARM_UP
from tests.zoo.gpu.setting import Setting, Step
from tests.zoo.timing import Ends


def built(name: str, setting: Setting) -> Step:
    """The step of the program of this name; tensors are made on the device unless they name another."""
    found = next(each for each in FAULTS if each.name == name)
    torch.manual_seed(0)
    with setting.device:
        step: Step = getattr(import_module(f"tests.zoo.gpu.{found.module}"), name)(setting)
    return step


def main() -> None:
    """Run the program that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", choices=[each.name for each in FAULTS])
    twin = parser.add_mutually_exclusive_group(required=True)
    twin.add_argument("--fault", action="store_true", help="with the planted fault")
    twin.add_argument("--clean", action="store_true", help="without it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a run without a GPU")
    parser.add_argument("--steps", type=int, default=48, help="steps to run (48)")
    parser.add_argument("--timed", type=int, default=20, help="steps to time (20)")
    parser.add_argument("--times", type=Path, help="write the timed steps there")
    options = parser.parse_args()
    device = torch.device(options.device)
    command.take_turn()
    step = built(options.name, Setting(options.fault, device, options.tiny))
    ends = Ends(device)
    for number in range(options.steps):
        with stepscope.step(number=number):
            step()
        if WARM_UP <= number <= WARM_UP + options.timed:
            ends.mark()
        if number == WARM_UP + options.timed and options.times:
            options.times.write_text(json.dumps(ends.steps_ns()))


if __name__ == "__main__":
    main()
