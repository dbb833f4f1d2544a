"""Remedies where an engine serves: its own options, and nothing about training."""

from __future__ import annotations

import re

from stepscope.analysis.serving import engine_called
from stepscope.diagnosis.rule import InServing
from stepscope.diagnosis.rules import (
    RULES,
    _waits,
    between_iterations,
    decode_graphs,
    exposed_copy,
    growing_work,
    launch_bound,
    low_precision,
    memory_headroom,
    one_request,
    prefill_stall,
    rejected_drafts,
    repeated_casts,
    repeated_prefix,
)

ENGINES = (
    "TensorRT-LLM",
    "TGI",
    "SGLang",
    "vLLM",
    "Triton Inference Server",
    "Diffusers",
    "Transformers' continuous batching",
    "Transformers",
)
TRAINING = re.compile(r"zero_grad|optimizer|backward|\bloss|gradient|\btrain", re.IGNORECASE)
MODULES = (_waits, between_iterations, decode_graphs, exposed_copy, growing_work, launch_bound, low_precision,
           memory_headroom, one_request, prefill_stall, rejected_drafts,
           repeated_casts, repeated_prefix)  # fmt: skip


def remedies() -> set[InServing]:
    of_modules = (each for module in MODULES for each in vars(module).values() if isinstance(each, InServing))
    return {*of_modules, *(rule.serving for rule in RULES if rule.serving is not None)}


def test_remedies_speak_of_inference() -> None:
    assert len(remedies()) > 10
    for remedy in remedies():
        assert not TRAINING.search(f"{remedy.text} {remedy.code}"), remedy
    for engine in ENGINES:
        for code in engine_called(engine).options.values():
            assert not TRAINING.search(code), code


def test_every_option_of_an_engine_is_asked_for() -> None:
    asked = {remedy.purpose for remedy in remedies()}
    for engine in ENGINES:
        assert set(engine_called(engine).options) <= asked, engine


def test_engines_that_serve_name_their_most_important_options() -> None:
    for engine in ("TensorRT-LLM", "TGI", "SGLang", "vLLM"):
        assert {"graphs", "graph_sizes", "chunked_prefill", "batch"} <= set(engine_called(engine).options)
