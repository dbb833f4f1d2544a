"""What a search does next, and what it ends with, where the truth is known."""

from __future__ import annotations

from stepscope.tune.next_trial import choices, is_new, plan
from stepscope.tune.trials import ON, Configuration, Knob, Proposal, Space, Trial
from tests.unit.tune.searches import Truth, measured, searched, space_of

FUSED, CLIP, COMPILE = Knob("fuse-optimizer"), Knob("clip-in-one-pass"), Knob("compile")
WORKERS = Knob("workers", ("1", "2", "4"), draws=True)
PREFETCH = Knob("prefetch", ("4",), needs="workers")


def best(truth: Truth, *knobs: Knob) -> dict[str, str]:
    return dict(searched(truth, space_of(*knobs))[0].settings)


def trial(number: int, proposal: Proposal, change: float, *, half_width: float = 0.005) -> Trial:
    return Trial(number, proposal, "measured", "", measured(change, half_width=half_width))


def alone(name: str, value: str = ON) -> Proposal:
    return Proposal("screen", Configuration(((name, value),)))


def test_nothing_to_try() -> None:
    step = plan(Space(), [])
    assert (step.phase, step.best.settings, step.proposals) == ("done", (), ())


def test_every_knob_is_tried_alone_before_the_second_value_of_any() -> None:
    step = plan(space_of(WORKERS, FUSED, PREFETCH), [])
    tried = [dict(proposal.configuration.settings) for proposal in step.proposals]
    assert step.phase == "screen"
    assert tried == [{"workers": "1"}, {"fuse-optimizer": ON}, {"workers": "2"}, {"workers": "4"}]


def test_what_helps_is_combined_and_what_does_not_is_left_out() -> None:
    truth = Truth({"fuse-optimizer": 0.8, "compile": 1.2, "workers=1": 0.9, "workers=2": 0.7, "workers=4": 0.75})
    assert best(truth, FUSED, COMPILE, CLIP, WORKERS) == {"fuse-optimizer": ON, "workers": "2"}


def test_what_no_longer_helps_on_top_of_the_rest_is_left_out() -> None:
    truth = Truth({"fuse-optimizer": 0.9, "compile": 0.6}, together={("fuse-optimizer", "compile"): 1 / 0.9})
    assert best(truth, FUSED, COMPILE) == {"compile": ON}


def test_what_needs_another_knob_is_tried_once_that_one_helps() -> None:
    truth = Truth({"workers=2": 0.8, "prefetch=4": 0.9})
    assert best(truth, WORKERS, PREFETCH) == {"workers": "2", "prefetch": "4"}
    truth = Truth({"prefetch=4": 0.9})
    assert best(truth, WORKERS, PREFETCH) == {}
    assert all(proposal.configuration.value("prefetch") is None for proposal in truth.proposals)


def test_another_value_that_is_better_on_top_of_the_rest() -> None:
    truth = Truth({"workers=2": 0.7, "workers=4": 0.72, "compile": 0.5}, together={("workers=4", "compile"): 0.8})
    assert best(truth, WORKERS, COMPILE) == {"compile": ON, "workers": "4"}


def test_remedies_that_cannot_be_applied_together_are_not_tried_together() -> None:
    truth = Truth({"bf16": 0.6, "fp16": 0.7})
    assert best(truth, Knob("bf16", losses="half"), Knob("fp16", losses="half")) == {"bf16": ON}
    assert all(len(proposal.configuration.settings) == 1 for proposal in truth.proposals)


def test_failures_and_other_losses_are_results_and_the_search_goes_on() -> None:
    truth = Truth(
        {"compile": 0.2, "fuse-optimizer": 0.8}, failing={"clip-in-one-pass": "out of memory"}, wrong=("compile",)
    )
    found, trials = searched(truth, space_of(CLIP, COMPILE, FUSED))
    assert dict(found.settings) == {"fuse-optimizer": ON}
    assert [trial.reason for trial in trials if trial.state == "failed"] == ["out of memory"]


def test_in_a_hurry_what_looks_best_is_proven_if_nothing_is_shown() -> None:
    space = space_of(FUSED, CLIP, COMPILE)
    noisy = [trial(0, alone("fuse-optimizer"), -0.05, half_width=0.1), trial(1, alone("clip-in-one-pass"), -0.2,
             half_width=0.3)]  # fmt: skip
    proof = Proposal("proof", Configuration((("clip-in-one-pass", ON),)))

    step = plan(space, noisy, hurry=True)
    assert (step.phase, step.best.settings, step.proposals) == ("proof", (), (proof,))
    step = plan(space, [*noisy, trial(2, proof, -0.2)], hurry=True)
    assert (step.phase, step.best) == ("done", proof.configuration)
    step = plan(space, [*noisy, trial(2, proof, -0.2, half_width=0.3)], hurry=True)
    assert (step.phase, step.best.settings, step.proof) == ("done", (), None)
    assert plan(space, [trial(0, alone("compile"), 0.1)], hurry=True).phase == "done"


def test_the_proof_is_a_measurement_of_its_own() -> None:
    truth = Truth({"fuse-optimizer": 0.8})
    _, trials = searched(truth, space_of(FUSED))
    proofs = [each for each in trials if each.proposal.purpose == "proof"]
    assert [each.proposal.key for each in proofs] == [Proposal("proof", Configuration((("fuse-optimizer", ON),))).key]
    assert trials[-1] is proofs[0]


def test_nothing_helps() -> None:
    truth = Truth({"fuse-optimizer": 0.995})
    found, trials = searched(truth, space_of(FUSED, CLIP))
    assert found.settings == ()
    assert {each.proposal.purpose for each in trials} == {"screen"}


def test_a_gain_that_is_not_clear_after_screening_is_measured_again() -> None:
    screened = trial(0, alone("compile"), -0.3, half_width=0.5)
    step = plan(space_of(COMPILE), [screened])
    assert step.phase == "combine"
    assert step.proposals == (Proposal("combine", alone("compile").configuration),)
    confirmed = trial(1, step.proposals[0], -0.25)
    assert dict(plan(space_of(COMPILE), [screened, confirmed]).best.settings) == {"compile": ON}
    refuted = trial(1, step.proposals[0], 0.01)
    assert plan(space_of(COMPILE), [screened, refuted]).best.settings == ()


def test_what_a_long_step_may_have_hidden_is_tried_once_more() -> None:
    knobs = space_of(COMPILE, FUSED, CLIP, WORKERS)
    helped = trial(0, alone("compile"), -0.7)
    others = [
        trial(1, alone("fuse-optimizer"), 0.0, half_width=0.03),  # may save 3 ms of the 30 that are left
        trial(2, alone("clip-in-one-pass"), 0.0, half_width=0.01),  # 1 ms at most
        trial(3, alone("workers", "1"), 0.2, half_width=0.1),  # is slower
        trial(4, alone("workers", "2"), 0.0, half_width=0.01),
        trial(5, alone("workers", "4"), 0.0, half_width=0.01),
    ]
    on_top = Proposal(
        "combine", Configuration.of({"compile": ON, "fuse-optimizer": ON}), alone("compile").configuration
    )
    step = plan(knobs, [helped, *others])
    assert (step.phase, step.proposals) == ("combine", (on_top,))
    found = plan(knobs, [helped, *others, trial(6, on_top, -0.1)])
    assert dict(found.best.settings) == {"compile": ON, "fuse-optimizer": ON}
    shorter_by_a_third = plan(knobs, [trial(0, alone("compile"), -0.33), *others])
    assert shorter_by_a_third.phase != "combine"


def test_what_others_measure_is_not_proposed_again() -> None:
    running = Trial(0, alone("compile"), "running")
    step = plan(space_of(COMPILE, FUSED), [running])
    assert step.proposals == (alone("fuse-optimizer"),)
    step = plan(space_of(COMPILE), [running])
    assert (step.phase, step.proposals) == ("screen", ())


def test_combinations_are_offered_ahead_but_count_only_where_they_apply() -> None:
    space = space_of(COMPILE, FUSED, CLIP)
    changes = {"compile": -0.5, "fuse-optimizer": -0.2, "clip-in-one-pass": -0.1}
    screened = [trial(number, alone(name), change) for number, (name, change) in enumerate(changes.items())]
    step = plan(space, screened)
    first, second = step.proposals
    assert dict(first.configuration.settings) == {"compile": ON, "fuse-optimizer": ON}
    assert dict(second.configuration.settings) == {"compile": ON, "clip-in-one-pass": ON}
    ahead = trial(3, second, -0.1)  # measured by another process before the first
    assert dict(plan(space, [*screened, ahead]).best.settings) == {"compile": ON}
    refuted = trial(4, first, 0.0)
    assert dict(plan(space, [*screened, ahead, refuted]).best.settings) == {"clip-in-one-pass": ON, "compile": ON}
    kept = trial(4, first, -0.2)
    step = plan(space, [*screened, ahead, kept])
    assert [dict(each.configuration.settings) for each in step.proposals] == [
        {"clip-in-one-pass": ON, "compile": ON, "fuse-optimizer": ON}
    ]


def test_in_a_hurry_what_is_known_is_proven() -> None:
    space = space_of(COMPILE, FUSED)
    step = plan(space, [trial(0, alone("compile"), -0.5)], hurry=True)
    assert step.proposals == (Proposal("proof", alone("compile").configuration),)
    assert plan(space, [], hurry=True).phase == "done"


def test_refinements_end_when_they_no_longer_help() -> None:
    space = space_of(COMPILE, FUSED, CLIP)
    changes = {"compile": -0.5, "fuse-optimizer": 0.0, "clip-in-one-pass": 0.2}
    known = [trial(number, alone(name), change) for number, (name, change) in enumerate(changes.items())]
    step = plan(space, known)
    assert step.phase == "refine"
    assert choices(space, known, step.best) == {"compile": (ON,), "fuse-optimizer": (ON,)}  # what harms is left out
    both = Configuration.of({"compile": ON, "fuse-optimizer": ON})
    assert is_new(space, known, both)
    helps = trial(3, Proposal("refine", both, step.best), -0.1)
    assert plan(space, [*known, helps]).best == both
    assert not is_new(space, [*known, helps], both)
    useless = [
        trial(number, Proposal("refine", Configuration.of({"compile": str(number)}), step.best), 0.0)
        for number in range(3, 7)
    ]
    assert plan(space, [*known, *useless]).phase == "proof"


def test_what_came_with_a_refinement_and_does_not_help_is_dropped_again() -> None:
    space = space_of(COMPILE, FUSED, CLIP)
    known = [trial(number, alone(name), -0.3) for number, name in enumerate(["compile"])]
    known += [trial(number, alone(name), 0.0) for number, name in enumerate(["fuse-optimizer", "clip-in-one-pass"], 1)]
    step = plan(space, known)
    whole = Configuration.of({"compile": ON, "fuse-optimizer": ON, "clip-in-one-pass": ON})
    known.append(trial(3, Proposal("refine", whole, step.best), -0.2))
    step = plan(space, known)
    assert (step.phase, step.best) == ("simplify", whole)
    [without_clip] = step.proposals
    assert without_clip == Proposal("simplify", whole.without("clip-in-one-pass"), whole)
    assert plan(space, known, hurry=True).proposals == (Proposal("proof", whole),)

    needed = plan(space, [*known, trial(4, without_clip, 0.1)])
    assert needed.proposals == (Proposal("simplify", whole.without("fuse-optimizer"), whole),)
    known.append(trial(4, without_clip, 0.0))
    [without_fused] = plan(space, known).proposals
    assert dict(without_fused.configuration.settings) == {"compile": ON}
    step = plan(space, [*known, trial(5, without_fused, 0.25)])
    assert (step.phase, dict(step.best.settings)) == ("refine", {"compile": ON, "fuse-optimizer": ON})


def test_a_proposal_survives_the_database() -> None:
    proposal = Proposal("combine", Configuration.of({"--x": "a b, 'c'", "workers": "2"}), Configuration.of({"--x": ON}))
    assert Proposal.from_key(proposal.key) == proposal
