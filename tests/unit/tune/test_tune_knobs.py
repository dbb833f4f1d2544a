"""Knobs as users write them, and what a configuration is in words."""

from __future__ import annotations

import msgspec
import pytest

from stepscope.errors import UsageError
from stepscope.tune.trials import ON, Configuration, Knob, Proposal, Space, named_once, user_knob

SPACE = Space(
    (
        Knob("workers", ("2", "4"), draws=True),
        Knob("bf16", losses="half"),
        user_knob("--batched-loss"),
        user_knob("--loader-workers=0,2"),
        user_knob("data.workers=0,2"),
        user_knob("env:OMP_NUM_THREADS=1,2"),
    ),
    ("something was left out",),
)
ALL = Configuration.of(
    {
        "workers": "4",
        "bf16": ON,
        "--batched-loss": ON,
        "--loader-workers": "2",
        "data.workers=": "0",
        "OMP_NUM_THREADS": "1",
    }
)


def test_a_configuration_reaches_the_program_in_four_ways() -> None:
    assert SPACE.apply_words(ALL) == ("bf16", "workers=4")
    assert SPACE.arguments(ALL) == ("--batched-loss", "--loader-workers", "2", "data.workers=0")
    assert SPACE.variables(ALL) == {"OMP_NUM_THREADS": "1"}
    assert SPACE.shown(ALL) == (
        "--batched-loss, --loader-workers 2, OMP_NUM_THREADS=1, bf16, data.workers=0, workers=4"
    )
    assert SPACE.shown(Configuration()) == "nothing"


def test_losses_are_as_close_as_those_of_the_coarsest_setting() -> None:
    assert SPACE.losses_of(ALL) == ("half", True)
    assert SPACE.losses_of(Configuration((("--batched-loss", ON),))) == ("reordered", False)
    assert SPACE.losses_of(Configuration()) == ("reordered", False)


def test_what_the_study_keeps_comes_back() -> None:
    assert msgspec.convert(msgspec.to_builtins(SPACE), Space) == SPACE
    proposal = Proposal("combine", ALL, Configuration())
    assert Proposal.from_key(proposal.key) == proposal


def test_knobs_of_one_name_are_one() -> None:
    first = Knob("workers", ("3",), source="finding", why="input-bound", promised_ns=7)
    [found] = named_once([first, Knob("workers", ("2", "3"), needs="x")])
    assert (found.values, found.source, found.promised_ns, found.needs) == (("3", "2"), "finding", 7, "x")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "'' is not a knob"),
        ("fused", "'fused' is not a knob: an option begins with -"),
        ("--x=", "'--x=' has an empty value: write --knob --x=0,2,4"),
        ("--x=1,,2", "has an empty value"),
        ("--x y=1", "'--x y=1' is not a knob: write --knob --loader-workers=0,2,4"),
        ("env:PATH", "'env:PATH' needs values"),
        ("--x=" + ",".join(map(str, range(17))), "has 17 values; at most 16 are tried"),
    ],
)
def test_what_is_no_knob(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        user_knob(text)
    assert sentence in str(caught.value)
