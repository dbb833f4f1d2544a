"""# What it finds
Checkpoints that are saved or loaded while steps run.

# Why it costs time
Saving copies every parameter and the optimizer's state to the host, serialises them and writes a file. Meanwhile the
training thread does nothing else and the device is idle.

# How it is measured
Idle time of the device (without a device: time of the main thread) inside `torch.save`, `torch.load`, `safetensors` or
`torch.distributed.checkpoint`. stepscope's own recordings name these calls; others show them where Python frames were
recorded.

# Known false positives
A short recording may happen to contain a checkpoint that is written once in thousands of steps: the finding says how
many of the recorded steps contain one.

# What to do
Save less often, or let a background thread write a copy while training continues.

# Reference
PyTorch's documentation of `torch.distributed.checkpoint.async_save`.
"""

from __future__ import annotations

from typing import Final

from stepscope.analysis.host import CAUSE_CODES
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.whatif.changes import scaled_stretches


def check(view: View, limits: Limits) -> Answers:
    pieces = view.pieces_of("checkpoint")
    cost = int(pieces["duration_ns"].sum())
    activity = view.activity
    mine = activity.cause == CAUSE_CODES["checkpoint"]
    holding = view.steps_with(pieces["start_ns"].to_numpy())
    figures = [
        view.ns_per_step("time lost", cost),
        Figure("recorded steps that hold one", holding, "count"),
        Figure("recorded steps", view.step_count, "count"),
    ]
    saved_bytes = view.program.process_figure("checkpoint_bytes")
    if saved_bytes:
        figures.append(view.bytes_per_step("bytes written", saved_bytes))
    yield Found(
        f"{view.percent(cost)} of the {view.period} goes to checkpoints, "
        f"in {holding} of {view.step_count} recorded steps",
        cost,
        basis="time in checkpoints, gone if they are saved outside the steps or very rarely",
        confidence="medium" if holding >= 2 else "low",
        figures=figures,
        intervals=view.longest(pieces, "saving or loading a checkpoint"),
        remedy=Remedy(
            "Save so rarely that a checkpoint's time does not matter, and write it in the background: the step then "
            "only waits for the copy.",
            "if step % 1000 == 0:\n"
            '    torch.distributed.checkpoint.async_save(state, checkpoint_id=f"step-{step}")\n'
            "# without torch.distributed, copy first and write in a thread:\n"
            '    copy = {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}\n'
            "    threading.Thread(target=torch.save, args=(copy, path)).start()",
        ),
        where=view.locations(pieces),
        # The checkpoints' copies to the host go too.
        change=scaled_stretches(activity.lane[mine], activity.start[mine], activity.end[mine], 0.0),
    )


RULE: Final = Rule(
    id="checkpoint-in-step",
    title="Steps wait for checkpoints",
    thresholds={"share": Threshold(0.02, "share", "share of the {period} lost to checkpoints")},
    check=check,
    remedies={
        "jax": Remedy(
            "Save so rarely that a checkpoint's time does not matter, and write it in the background.",
            "manager = orbax.checkpoint.CheckpointManager(path, options=orbax.checkpoint.CheckpointManagerOptions(\n"
            "    save_interval_steps=1000, enable_async_checkpointing=True))",
        ),
    },
)
