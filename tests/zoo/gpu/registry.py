"""The programs and what is planted in each; nothing here needs torch."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
MARK: Final = "# planted"
WARM_UP: Final = 10
"""Steps of a program before those that it times."""
BEFORE_RECORDING: Final = 6
"""Steps between those and a recording: the recorder looks at the program and prepares its profiler."""


@dataclass(frozen=True)
class Fault:
    """One program.

    Attributes:
        module: the file in this folder.
        name: of its function there.
        planted: the fault, in a sentence.
        rules: identifiers of the rules of which one should come first; none where no rule is about it.
        needs: modules beyond torch without which there is no such program.
        capability: least compute capability of the device that the twin needs.
        is_note: True where the rule promises nothing, so that it need not come first to be right.
        has_place: False where no line is the right one.
    """

    module: str
    name: str
    planted: str
    rules: tuple[str, ...]
    needs: tuple[str, ...] = ()
    capability: tuple[int, int] = (0, 0)
    is_note: bool = False
    has_place: bool = True

    @property
    def path(self) -> Path:
        """The program's file."""
        return FOLDER / f"{self.module}.py"

    @property
    def lines(self) -> frozenset[tuple[str, int]]:
        """File and number of each line that is marked: of the function, and in setting.py those that name it."""
        text = self.path.read_text(encoding="utf-8")
        found = next(
            node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == self.name
        )
        own = {
            (self.path.name, number)
            for number, line in enumerate(text.splitlines(), 1)
            if found.lineno <= number <= (found.end_lineno or 0) and line.endswith(MARK)
        }
        shared = (FOLDER / "setting.py").read_text(encoding="utf-8").splitlines()
        named = {
            ("setting.py", number) for number, line in enumerate(shared, 1) if line.endswith(f"{MARK}: {self.name}")
        }
        return frozenset(own | named)


FAULTS: Final = (
    Fault("copies", "unpinned_copies", "Batches are copied from pageable memory.", ("exposed-copy",)),
    Fault(
        "copies",
        "copies_without_overlap",
        "Batches are copied from pinned memory on the queue that computes.",
        ("device-tail", "exposed-copy"),
    ),
    Fault("copies", "activations_to_host_and_back", "Activations visit the host.", ("device-ping-pong",)),
    Fault(
        "copies", "masks_made_on_host", "Each step makes a mask on the host and copies it.", ("host-created-tensor",)
    ),
    Fault("copies", "cache_copied_for_each_token", "A cache of keys grows by torch.cat.", ("growing-work",)),
    Fault("host", "loss_read_in_step", "Each layer's mean is read by the host.", ("host-synchronisation",)),
    Fault("host", "synchronised_layers", "The host waits for the device after each layer.", ("host-synchronisation",)),
    Fault("host", "boolean_mask", "Rows are chosen by a boolean mask.", ("host-synchronisation",)),
    Fault("host", "small_model", "Many small layers are launched one by one.", ("launch-bound",), has_place=False),
    Fault(
        "host",
        "decoding_kernel_by_kernel",
        "Tokens are decoded without a graph.",
        ("decode-graphs", "launch-bound"),
        has_place=False,
    ),
    Fault("host", "optimizer_tensor_by_tensor", "AdamW without foreach.", ("single-tensor-optimizer",)),
    Fault(
        "host",
        "small_all_reduces",
        "The gradient of each parameter is reduced alone.",
        ("small-buckets", "exposed-communication", "loop-in-step"),
    ),
    Fault("host", "graph_breaks", "A compiled function reads a number in the middle.", ("graph-break",)),
    Fault("host", "dynamic_shapes", "Each step has another length, compiled anew.", ("recompilation",)),
    Fault("memory", "cache_emptied", "Each step empties the allocator's cache.", ("allocator-retries",)),
    Fault("memory", "memory_from_driver", "Each step needs a larger block.", ("allocator-retries",)),
    Fault("kernels", "products_in_fp32", "Products in FP32 without TF32.", ("low-precision",)),
    Fault(
        "kernels",
        "channels_first",
        "Convolutions in fp16 with channels first.",
        ("layout-conversion", "inefficient-kernel"),
    ),
    Fault("kernels", "attention_written_out", "Attention as products and a softmax.", ("unfused-attention",)),
    Fault(
        "kernels",
        "vocabulary_off_the_tiles",
        "A vocabulary of 50,257 words in bf16.",
        ("unaligned-dimensions", "inefficient-kernel"),
    ),
    Fault(
        "kernels",
        "weights_that_fp8_could_hold",
        "Tokens are decoded with weights in bf16 on a device with FP8.",
        ("low-precision",),
        capability=(8, 9),
        is_note=True,
    ),
    Fault(
        "kernels",
        "few_triton_blocks",
        "A Triton kernel of four blocks.",
        ("low-occupancy",),
        needs=("triton",),
    ),
    Fault(
        "kernels",
        "queues_in_a_row",
        "Independent small kernels on queues that wait for one another.",
        ("low-occupancy", "launch-bound"),
        has_place=False,
    ),
    Fault(
        "kernels",
        "power_limit",
        "Products of random numbers, which draw more power than zeros and lower the clock.",
        (),
        has_place=False,
    ),
)


def fault(name: str) -> Fault:
    """The program of this name; KeyError where there is none."""
    return {each.name: each for each in FAULTS}[name]
