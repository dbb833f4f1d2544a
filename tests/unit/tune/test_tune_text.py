"""What a search came to, as text, Markdown and JSON; with results written by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from stepscope.report.text import markdown_of, text_of
from stepscope.report.tune import (
    command_line,
    gain_words,
    loss_words,
    noise_sentence,
    outcome_sentence,
    proof_sentence,
    trial_row,
    tune_document,
    tune_json,
)
from stepscope.tune.search import TuneResult
from stepscope.tune.trials import ON, Configuration, Knob, LossCheck, Measured, Proposal, Trial, user_knob
from tests.unit.rendered import written
from tests.unit.tune.searches import DIFFERENT, measured, space_of

FUSED = Knob(
    "fuse-optimizer", source="finding", why="unfused-optimizer: 48 kernels <b>a step", code="AdamW(..., fused=True)"
)
SPACE = replace(
    space_of(FUSED, Knob("workers", ("2",)), user_knob("--fast"), user_knob("env:A_B=1")), said=("x was left out",)
)
BEST = Configuration.of({"fuse-optimizer": ON, "workers": "2"})
LOSSES = LossCheck(True, 3e-6, 1e-4, "tolerance", 50)
PROOF = Measured(
    48.2e6, 20.1e6, 20.1 / 48.2 - 1, 1 / 2.49 - 1, 1 / 2.31 - 1, 0.95, "faster", 4, 160, LOSSES,
    ("fuse-optimizer: AdamW made at train.py:31 now runs fused", "workers=2: odd"), ("2 steps after take long.",),
)  # fmt: skip


def alone(name: str, value: str = ON) -> Proposal:
    return Proposal("screen", Configuration(((name, value),)))


TRIALS = (
    Trial(0, alone("fuse-optimizer"), "measured", "", measured(-0.5)),
    Trial(1, alone("workers", "2"), "measured", "", measured(-0.02, half_width=0.1)),
    Trial(2, alone("--fast"), "failed", "the program failed with exit code 1: \x1b[31mboom"),
    Trial(3, alone("A_B", "1"), "measured", "the losses differ", measured(-0.9, losses=DIFFERENT)),
    Trial(4, Proposal("combine", BEST, Configuration((("fuse-optimizer", ON),))), "measured", "", measured(-0.1)),
    Trial(5, Proposal("proof", BEST), "measured", "", PROOF),
    Trial(6, alone("workers", "2"), "running"),
)
RESULT = TuneResult(SPACE, TRIALS, BEST, TRIALS[5], "done", 754.0)
NOTHING = TuneResult(SPACE, TRIALS[2:3], Configuration(), None, "budget", 3.0)
COMMAND = ("train.py", "--api-key", "hunter2", "--out", "a b")


def test_the_proof_in_one_sentence() -> None:
    assert proof_sentence(PROOF) == (
        "step 48.2 ms -> 20.1 ms: 2.40 times faster (95 % interval 2.31 to 2.49), "
        "losses equal within 1e-4 (largest difference 3.0e-6 in 50 losses)"
    )
    assert outcome_sentence(RESULT) == proof_sentence(PROOF)


def test_results_that_are_none() -> None:
    assert outcome_sentence(NOTHING) == "nothing was measured"
    useless = replace(NOTHING, trials=(Trial(0, alone("--fast"), "measured", "", measured(0.0)),))
    assert outcome_sentence(useless) == "nothing that was tried provably makes the step shorter"
    unproven = replace(RESULT, proof=None)
    assert outcome_sentence(unproven).endswith("fresh runs to prove it are missing")
    chance = replace(RESULT, proof=replace(TRIALS[5], measured=measured(-0.01, half_width=0.05)))
    assert outcome_sentence(chance) == (
        "it looked faster in the search, but fresh runs do not show it: 1.01 times faster, interval 0.96 to 1.06"
    )
    assert not chance.is_proven
    text = text_of(tune_document(chance, COMMAND), width=120)
    assert text.startswith("It looked faster")
    assert "\nBest so far, not proven  fuse-optimizer, workers=2\n" in text
    assert "\nTo try it\n" in text
    wrong = replace(RESULT, proof=replace(TRIALS[5], measured=replace(PROOF, losses=DIFFERENT)))
    assert outcome_sentence(wrong).endswith("losses differ by more than 1e-4 (largest difference 3.0e-2 in 50 losses)")


def test_how_losses_were_judged() -> None:
    assert loss_words(LossCheck(None)) == "losses not compared: no backward pass was seen"
    assert loss_words(replace(LOSSES, basis="runs")).startswith(
        "losses as close as those of two runs of the unchanged program"
    )
    assert "another seed's 2.0e-1" in loss_words(replace(LOSSES, basis="seed", allowed=0.2))


def test_the_command_line_to_use() -> None:
    assert command_line(RESULT, COMMAND) == (
        "stepscope run --apply fuse-optimizer,workers=2 train.py --api-key *** --out 'a b'"
    )
    own = replace(RESULT, best=Configuration.of({"--fast": ON, "A_B": "1"}))
    assert command_line(own, ("train.py",)) == "A_B=1 python train.py --fast"
    assert command_line(own, ("torchrun", "train.py")) == "A_B=1 torchrun train.py --fast"


def test_another_value_of_a_setting_stands_for_the_one_that_it_takes_the_place_of() -> None:
    two, fused = ("workers", "2"), ("fuse-optimizer", ON)
    other = Proposal("combine", Configuration((fused, ("workers", "1"))), Configuration((fused, two)))
    without = Proposal("simplify", Configuration((fused,)), Configuration((fused, two)))
    assert trial_row(RESULT, replace(TRIALS[0], proposal=other))[:2] == (
        "workers=1 instead of workers=2",
        "fuse-optimizer",
    )
    assert trial_row(RESULT, replace(TRIALS[0], proposal=without))[:2] == (
        "without workers",
        "fuse-optimizer, workers=2",
    )


def test_the_text() -> None:
    text = text_of(tune_document(RESULT, COMMAND), width=120)
    lines = text.splitlines()
    assert "Best  fuse-optimizer, workers=2" in lines
    assert lines[0].startswith("Step 48.2 ms -> 20.1 ms: 2.40 times faster (95 % interval 2.31 to 2.49)")
    assert "  - AdamW made at train.py:31 now runs fused" in lines
    assert "      AdamW(..., fused=True)" in lines
    assert "      DataLoader(dataset, ..., num_workers=2)" in lines
    rows = {re.split("  +", line.strip())[0]: re.split("  +", line.strip()) for line in lines}
    assert "kept" in rows["fuse-optimizer"]
    assert "kept" in rows["workers=2"]  # on top of the fused optimizer, which the table says
    assert "may help, not shown" in text
    assert "losses differ" in rows["A_B=1"]
    assert "failed" in rows["--fast"]
    assert r"  - --fast: the program failed with exit code 1: \x1b[31mboom" in lines
    assert "  - A_B=1: losses differ by more than 1e-4 (largest difference 3.0e-2 in 50 losses)" in lines
    assert "proven" in rows["the best, in fresh runs"]
    assert "\x1b" not in text
    assert "6 comparisons were measured, each with both sides in turn; this process took 754.00 s." in text
    assert "2 steps with the best take long." in text
    assert "x was left out." in text


def test_the_markdown_is_escaped() -> None:
    text = markdown_of(tune_document(RESULT, COMMAND))
    assert text.startswith("**Step 48.2 ms -&gt; 20.1 ms: 2.40 times faster")
    assert "<b>" not in text
    command = "stepscope run --apply fuse-optimizer,workers=2 train.py --api-key *** --out 'a b'"
    assert f"### To use it\n\n```sh\n{command}\n```" in text
    assert "```python\nAdamW(..., fused=True)\n```" in text
    assert markdown_of(tune_document(NOTHING, COMMAND)).startswith("**Nothing was measured.**")


def test_the_json() -> None:
    content = written(tune_json(RESULT, COMMAND))
    assert (content["schema"], content["is_proven"], content["stop"]) == (1, True, "done")
    assert content["best"]["apply"] == ["fuse-optimizer", "workers=2"]
    assert content["proof"]["measured"]["change"] == PROOF.change
    assert "hunter2" not in json.dumps(content)
    assert [trial["outcome"] for trial in content["trials"]][:2] == ["kept", "may help, not shown"]
    assert written(tune_json(NOTHING, COMMAND))["best"] is None


def test_progress() -> None:
    assert gain_words(TRIALS[0]) == "100.0 ms -> 50.0 ms, 2.00 times faster (1.98 to 2.02)"
    slower = replace(TRIALS[0], measured=measured(0.25, half_width=0.05))
    assert gain_words(slower) == "100.0 ms -> 125.0 ms, 1.25 times slower (1.20 to 1.30)"
    assert gain_words(TRIALS[2]) == TRIALS[2].reason
    assert gain_words(TRIALS[3]).endswith("; losses differ by more than 1e-4 (largest difference 3.0e-2 in 50 losses)")


def test_a_noisy_machine_is_told_with_what_to_do() -> None:
    def trials(half_width: float, other_cores: float | None) -> list[Trial]:
        found = replace(measured(-0.02, half_width=half_width), other_cores=other_cores)
        return [Trial(number, Proposal("screen", Configuration()), "measured", "", found) for number in range(2)]

    noisy = noise_sentence(trials(0.12, 1.3))
    assert "1.3 cores" in noisy
    assert "12%" in noisy
    assert "--quiet-machine" in noisy
    assert "cores" not in noise_sentence(trials(0.12, 0.1))
    assert noise_sentence(trials(0.01, 1.3)) == noise_sentence([]) == ""
