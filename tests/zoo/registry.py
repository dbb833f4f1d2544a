"""The zoo's programs and what is planted in each, read from their texts without running them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
MODELS: Final = FOLDER / "models.py"
MARK: Final = "# planted"
TURN: Final = "STEPSCOPE_ZOO_TURN"
"""Variable that names a file which programs lock: one of them uses the device at a time, while others start or end."""
PROGRAMS: Final = (
    # input
    "loading_in_main_process",
    "slow_transform",
    "slow_collate",
    "workers_restarted",
    "too_many_workers",
    # logging and checkpoints
    "printing_weights",
    "progress_table",
    "metrics_every_step",
    "csv_every_step",
    "histograms_every_step",
    "checkpoint_every_step",
    # the process
    "collecting_garbage",
    "many_objects",
    "too_many_threads",
    "anomaly_detection",
    "memory_given_back",
    # loops
    "per_token_loss",
    "sample_by_sample",
    "head_by_head",
    "handwritten_lstm",
    "expert_by_expert",
    # operators that belong together
    "handwritten_gelu",
    "handwritten_layernorm",
    "attention_by_hand",
    # the optimizer
    "optimizer_one_by_one",
    "clipping_one_by_one",
    "gradients_set_to_zero",
    # compilation
    "recompiling_shapes",
    "recompiling_counter",
    "reading_between_layers",
    # precision, layout, shapes
    "double_precision",
    "casts_to_and_fro",
    "layouts_to_and_fro",
    "padded_batches",
    "large_logits",
    "dense_embedding_gradient",
    # memory
    "losses_with_graph",
    # several ranks
    "small_gradient_buckets",
    "looking_for_unused_parameters",
    "rank_with_longer_texts",
    # inference
    "decoding_without_cache",
    "requests_one_by_one",
    "sampling_on_host",
    "detokenising_again",
    "prompts_padded_to_longest",
    "logits_of_all_positions",
    "graphs_in_inference",
    "dropout_left_on",
    "weights_dequantised_each_step",
    "cache_grown_by_cat",
    "attention_computed_eagerly",
    "instructions_read_again",
    "engine_one_request_at_a_time",
    "engine_with_small_batches",
    "engine_with_eager_attention",
    "engine_without_shared_prefixes",
    "engine_with_slow_scheduler",
)


@dataclass(frozen=True)
class Program:
    """One program of the zoo.

    Attributes:
        name: of its module in this folder.
        planted: the fault, in a sentence.
        rule: identifier of the rule that should find it first.
        lines: names of files and numbers of lines that are marked as the fault's: in the program's own file all that
            end with MARK, in models.py those that name the program as well.
        ranks: processes to start it with, by torchrun where it is more than one.
        has_place: False where the fault is in all that the program does, and no line is the right one.
        saves_time: False where the fault costs memory alone.
    """

    name: str
    planted: str
    rule: str
    lines: frozenset[tuple[str, int]]
    ranks: int
    has_place: bool
    saves_time: bool

    @property
    def path(self) -> Path:
        """The program's file."""
        return FOLDER / f"{self.name}.py"

    def names_the_line(self, file: str, line: int) -> bool:
        """Whether a place in the code is one that the program marks."""
        return (Path(file).name, line) in self.lines


def program(name: str) -> Program:
    """The program of that name.

    Raises:
        ValueError: its docstring lacks what every program's has.
    """
    text = (FOLDER / f"{name}.py").read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    lines = _marked(FOLDER / f"{name}.py", MARK)
    if not lines:
        raise ValueError(f"{name}.py marks no line with {MARK!r}")
    lines |= _marked(MODELS, f"{MARK}: {name}")
    return Program(
        name,
        _said(docstring, name, "Planted"),
        _said(docstring, name, "Expected"),
        lines,
        int(_said(docstring, name, "Ranks", "1")),
        _said(docstring, name, "Place", "marked") == "marked",
        _said(docstring, name, "Saves", "time") == "time",
    )


def programs() -> tuple[Program, ...]:
    """All programs."""
    return tuple(program(name) for name in PROGRAMS)


def _marked(path: Path, mark: str) -> frozenset[tuple[str, int]]:
    lines = path.read_text().splitlines()
    return frozenset((path.name, number) for number, line in enumerate(lines, 1) if line.endswith(mark))


def _said(docstring: str, name: str, what: str, default: str | None = None) -> str:
    found = re.search(rf"^{what}: (.+)$", docstring, re.MULTILINE)
    if found:
        return found[1]
    if default is None:
        raise ValueError(f"the docstring of {name}.py has no line that begins with {what!r}")
    return default
