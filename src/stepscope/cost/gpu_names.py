"""Which row of the device table a price list means by "A100-80GB" or "NVIDIA A100 80GB PCIe"."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from stepscope.devices import device_table

_MEMORY_TOLERANCE: Final = 0.1
_MAKERS: Final = re.compile(r"\b(?:nvidia|amd|intel|google|habana|tesla|geforce|quadro|instinct|radeon|cloud)\b")
_FORMS: Final = {"sxm": "sxm", "sxm2": "sxm", "sxm3": "sxm", "sxm4": "sxm", "sxm5": "sxm", "sxm6": "sxm", "hgx": "sxm"}
_FORMS_OF_CARDS: Final = {"pcie": "pcie", "pci": "pcie", "nvl": "nvl"}
_ALIASES: Final = {"h100mega": "h100"}
_MEMORY: Final = re.compile(r"(\d{1,4})(?:g|gb|gib)")
_TPU: Final = re.compile(r"(?:tpu-?)?(v5litepod|v5lite|v5e|v5p|v4|v6e)(?:-(\d{1,6}))?")
_TPUS: Final = {"v4": "TPU v4", "v5p": "TPU v5p", "v6e": "TPU v6e"}
_CORES_A_CHIP: Final = 2
"""Names such as v4-8 count cores, of which each chip of v4 and v5p has two; those of v5e and v6e count chips."""
_COUNTED_BY_CORE: Final = ("v4", "v5p")

# Machines that come with one form of a GPU alone, by their makers' descriptions:
#   https://aws.amazon.com/ec2/instance-types/accelerated-computing/
#   https://cloud.google.com/compute/docs/gpus
#   https://learn.microsoft.com/azure/virtual-machines/sizes/overview
_MACHINES: Final = (
    (re.compile(r"p3\.(?:2|8|16)xlarge"), "v100", "V100-SXM2-16GB"),
    (re.compile(r"p3dn\.24xlarge"), "v100", "V100-SXM2-32GB"),
    (re.compile(r"p4d\.24xlarge"), "a100", "A100-SXM4-40GB"),
    (re.compile(r"p4de\.24xlarge"), "a100", "A100-SXM4-80GB"),
    (re.compile(r"p5\.(?:4|48)xlarge"), "h100", "H100-SXM"),
    (re.compile(r"n1-\w+-\d+"), "v100", "V100-SXM2-16GB"),
    (re.compile(r"n1-\w+-\d+"), "p100", "P100-PCIe-16GB"),
    (re.compile(r"a2-(?:high|mega)gpu-\d+g"), "a100", "A100-SXM4-40GB"),
    (re.compile(r"a2-ultragpu-\d+g"), "a100", "A100-SXM4-80GB"),
    (re.compile(r"a3-(?:high|mega)gpu-\d+g"), "h100", "H100-SXM"),
    (re.compile(r"(?:standard_)?nc\d+r?s_v2"), "p100", "P100-PCIe-16GB"),
    (re.compile(r"(?:standard_)?nc\d+r?s_v3"), "v100", "V100-PCIe-16GB"),
    (re.compile(r"(?:standard_)?nc\d+ads_a100_v4"), "a100", "A100-PCIe-80GB"),
    (re.compile(r"(?:standard_)?nd96am?sr_(?:a100_)?v4"), "a100", None),
    (re.compile(r"(?:standard_)?nd96is?r_h100_v5"), "h100", "H100-SXM"),
)


@dataclass(frozen=True, slots=True)
class _Name:
    model: str
    form: str | None
    memory_gb: float | None


@dataclass(frozen=True, slots=True)
class NamedGpu:
    """What a price list's name for a GPU means.

    Attributes:
        device: the row's name; None where there is none, or several could be meant.
        count: how many the name itself stands for: 8 for "tpu-v5litepod-8", else 1.
        candidates: the rows that could be meant where there are several.
    """

    device: str | None
    count: int = 1
    candidates: tuple[str, ...] = ()


def named_gpu(name: str, *, memory_gb: float | None = None, instance: str = "") -> NamedGpu:
    """The device that a price list means.

    Args:
        memory_gb: of one GPU, where the list says; GB or GiB.
        instance: the machine, which may tell what the name leaves open.
    """
    machine = re.sub(r"\s+", "_", instance.strip().lower())
    return _named(name.strip().lower(), None if memory_gb is None else round(memory_gb, 3), machine)


@lru_cache(maxsize=4096)
def _named(name: str, memory_gb: float | None, instance: str) -> NamedGpu:
    tpu = _TPU.fullmatch(name)
    if tpu is not None:
        return _tpu(tpu[1], tpu[2])
    wanted = _parsed(name)
    found = [row for row, parsed in _rows() if _means(wanted, memory_gb, parsed)]
    if len(found) > 1:
        found = list(_of_machine(instance, wanted, found)) or found
    return NamedGpu(found[0]) if len(found) == 1 else NamedGpu(None, candidates=tuple(found))


def _tpu(generation: str, number: str | None) -> NamedGpu:
    device = _TPUS.get(generation, "TPU v5e")
    count = int(number or 1)
    if generation in _COUNTED_BY_CORE and number:
        count = max(count // _CORES_A_CHIP, 1)
    return NamedGpu(device if count else None, max(count, 1))


@lru_cache(maxsize=1)
def _rows() -> tuple[tuple[str, _Name], ...]:
    # A row for one of two dies is no accelerator that anyone rents.
    return tuple(
        (row.name, _Name(parsed.model, parsed.form, None if row.memory_bytes is None else row.memory_bytes / 1e9))
        for row in device_table()
        if "(" not in row.name
        for parsed in (_parsed(row.name.lower()),)
    )


def _parsed(name: str) -> _Name:
    words = re.findall(r"[a-z0-9]+", _MAKERS.sub(" ", name))
    model, form, memory = [], None, None
    for word in words:
        amount = _MEMORY.fullmatch(word)
        if word in _FORMS or word in _FORMS_OF_CARDS:
            form = _FORMS.get(word) or _FORMS_OF_CARDS[word]
        elif amount is not None:
            memory = float(amount[1])
        else:
            model.append(word)
    together = "".join(model)
    return _Name(_ALIASES.get(together, together), form, memory)


def _means(wanted: _Name, memory_gb: float | None, row: _Name) -> bool:
    if not wanted.model or row.model not in (wanted.model, f"rtx{wanted.model}"):
        return False
    if wanted.form is not None and row.form is not None and wanted.form != row.form:
        return False
    if wanted.form == "nvl" and row.form != "nvl":
        return False
    asked = wanted.memory_gb if wanted.memory_gb is not None else memory_gb
    if asked is None or row.memory_gb is None:
        return True
    return abs(asked / row.memory_gb - 1) <= _MEMORY_TOLERANCE


def _of_machine(instance: str, wanted: _Name, found: list[str]) -> Iterator[str]:
    """Those that the machine's name leaves: by what is known of the machine, else by a form that its name says."""
    for pattern, model, device in _MACHINES:
        if model == wanted.model and pattern.fullmatch(instance):
            yield from (row for row in found if row == device or (device is None and "SXM" in row))
            return
    form = _parsed(instance.replace("_", " ")).form
    if form is not None:
        yield from (row for row in found if _parsed(row.lower()).form == form)
