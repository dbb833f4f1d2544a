"""The libraries' functions in which the time at a place goes."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.analysis.attribution import attribute
from stepscope.analysis.places import Place, places
from stepscope.trace import Trace
from stepscope.trace.naming import is_third_party_file
from tests.unit.recording import Recording


def calling(user: str | None) -> Trace:
    """Two calls of a library below this frame; in each, 60 of 100 ns are in resize, 30 in a user's callback."""
    recording = Recording()
    for begin in (0, 100):
        if user is not None:
            recording.frame(begin, 100, user)
        recording.frame(begin, 96, "transformers/pipelines/base.py(10): __call__")
        recording.frame(begin + 1, 94, "torch/nn/modules/module.py(1700): _call_impl")
        recording.frame(begin + 2, 92, "transformers/pipelines/image.py(20): preprocess")
        recording.frame(begin + 3, 60, "PIL/Image.py(30): resize")
        recording.operator(begin + 4, 55, "aten::a")
        if user is not None:
            recording.frame(begin + 64, 29, "train.py(40): callback")
        recording.operator(begin + 65, 26, "aten::b")
    return recording.trace()


def found(trace: Trace) -> list[Place]:
    attribution = attribute(trace)
    ns = trace.operators["duration_ns"].to_numpy()
    return places(attribution, attribution.operator_slices, ns)


def test_a_place_names_the_functions_that_hold_half_of_its_time() -> None:
    step, callback = found(calling("train.py(12): step"))

    assert (step.file, step.line, step.ns) == ("train.py", 12, 110)
    assert step.inside == (
        "transformers/pipelines/base.py:10 __call__",
        "transformers/pipelines/image.py:20 preprocess",
        "PIL/Image.py:30 resize",
    )
    assert (callback.file, callback.line, callback.ns, callback.inside) == ("train.py", 40, 52, ())


def test_a_function_with_less_than_half_of_the_time_is_not_named() -> None:
    trace = calling("train.py(12): step")
    attribution = attribute(trace)

    [first, _] = places(attribution, attribution.operator_slices, np.array([40, 50, 40, 50]))
    assert (first.line, first.inside) == (40, ())
    [only] = places(attribution, attribution.operator_slices[:1], np.array([40]))
    assert only.inside[-1] == "PIL/Image.py:30 resize"


def test_without_a_frame_of_the_user_the_library_is_the_place() -> None:
    resize, preprocess = found(calling(None))

    assert (resize.file, resize.line, resize.function, resize.ns) == ("PIL/Image.py", 30, "resize", 110)
    assert (preprocess.file, preprocess.line, preprocess.ns) == ("transformers/pipelines/image.py", 20, 52)


def test_no_frames_no_places() -> None:
    recording = Recording()
    recording.operator(0, 10, "aten::a")
    assert found(recording.trace()) == []


@pytest.mark.parametrize(
    ("file", "tells"),
    [
        ("transformers/pipelines/base.py", True),
        ("/opt/env/lib/python3.11/site-packages/PIL/Image.py", True),
        ("/usr/lib/python3/dist-packages/numpy/core/numeric.py", True),
        ("torch/nn/modules/module.py", False),
        ("/opt/env/lib/python3.11/site-packages/torch/utils/_device.py", False),
        ("threading.py", False),
        ("/usr/lib/python3.11/threading.py", False),
        ("<string>", False),
        ("train.py", False),
        ("", False),
        (None, False),
    ],
)
def test_which_files_tell_what_is_done(file: str | None, tells: bool) -> None:
    assert is_third_party_file(file) is tells
