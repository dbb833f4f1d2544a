"""Libraries that run a training loop, and their own options: data/trainers.toml."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from stepscope.diagnosis.finding import Remedy, Trainer, trainer_of, trainers
from stepscope.diagnosis.rule import Answers, Found, Limits, Rule, Threshold
from stepscope.diagnosis.rules import RULES
from stepscope.diagnosis.view import View
from stepscope.record.apply import parse_applications
from stepscope.trace import Metadata
from stepscope.trace.program_facts import ProgramFacts
from tests.unit.recording import Recording

BY_NAME = {trainer.name: trainer for trainer in trainers()}
ENV = "/env/lib/python3.11/site-packages/"


@pytest.mark.parametrize(
    ("paths", "name"),
    [
        ([f"{ENV}transformers/trainer.py", f"{ENV}accelerate/optimizer.py"], "Transformers"),
        ([f"{ENV}lightning/pytorch/loops/fit_loop.py"], "Lightning"),
        ([f"{ENV}pytorch_lightning/trainer/trainer.py"], "Lightning"),
        (["C:\\env\\ultralytics\\engine\\trainer.py"], "Ultralytics"),
        (["/home/alice/torchtitan/torchtitan/train.py"], "torchtitan"),
        ([f"{ENV}timm/data/loader.py", "train.py"], "timm"),
        ([f"{ENV}accelerate/optimizer.py"], "Accelerate"),
        ([f"{ENV}transformers/models/gpt2/modeling_gpt2.py"], None),
        (["train.py"], None),
        ([], None),
    ],
)
def test_the_library_is_told_by_its_files(paths: list[str], name: str | None) -> None:
    found = trainer_of(paths)

    assert (found.name if found is not None else None) == name


def test_a_remedy_gets_the_librarys_options() -> None:
    remedy = Remedy("Load ahead.", "loader = ...", ("workers=3", "persistent-workers", "unknown"), diff="-a\n+b")

    code = BY_NAME["Transformers"].remedy("input-bound", remedy).code
    assert "dataloader_num_workers=3, dataloader_persistent_workers=True)" in code
    assert "--dataloader.num_workers 3 --dataloader" in BY_NAME["torchtitan"].remedy("input-bound", remedy).code
    assert BY_NAME["Transformers"].remedy("input-bound", remedy).apply == remedy.apply
    assert BY_NAME["Lightning"].remedy("input-bound", remedy) is remedy
    assert "group_by_length" in BY_NAME["Transformers"].remedy("padding-waste", Remedy("Sort.")).code


def test_findings_name_the_option_of_the_programs_library() -> None:
    def check(view: View, limits: Limits) -> Answers:
        yield Found("it", 100, "counted", "high", Remedy("Do it.", "do = it", ("bf16",)), is_tried=False)

    def remedy(*stack: str) -> Remedy:
        recording = Recording(Metadata(program=ProgramFacts(stack=stack)))
        recording.step(0, 1000, 0)
        recording.annotation(0, 1000, "Optimizer.step#AdamW.step")
        rule = Rule("zero-grad", "It", {"share": Threshold(0.1, "share", "of the {period}")}, check)
        return rule.ask(View(recording.trace())).findings[0].remedy

    assert remedy(f"{ENV}lightning/pytorch/loops/fit_loop.py").code.endswith('Trainer(..., precision="bf16-mixed")')
    assert remedy("train.py") == Remedy("Do it.", "do = it")


@pytest.mark.parametrize("trainer", trainers(), ids=lambda trainer: trainer.name)
def test_rules_and_flags_exist(trainer: Trainer) -> None:
    known = {rule.id for rule in RULES}

    assert set(trainer.rules) <= known
    for flag, option in trainer.flags.items():
        parse_applications(f"{flag}=2" if "{value}" in option else flag)


def keywords_of(code: str) -> set[str]:
    """Keywords of all calls in a snippet; a command line's options by their last word."""
    return {one or other for one, other in re.findall(r"(?<=[( ])(\w+)=(?!=)|--(?:\w+\.)*(\w+)", code)}


def folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def parameters_in(file: Path, function: str) -> set[str]:
    """A function's parameters by the package's source, which needs nothing else to be installed."""
    found = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef))
    arguments = next(node.args for node in found if node.name == function)
    return {each.arg for each in (*arguments.args, *arguments.kwonlyargs)}


def fields_in(folder: Path) -> set[str]:
    """Names of annotated fields in the package's source."""
    trees = (ast.parse(file.read_text()) for file in folder.rglob("*.py") if "experiments" not in file.parts)
    fields = (node.target for tree in trees for node in ast.walk(tree) if isinstance(node, ast.AnnAssign))
    return {target.id for target in fields if isinstance(target, ast.Name)}


def of_transformers() -> set[str]:
    from transformers import Trainer as RealTrainer
    from transformers import TrainingArguments

    names = {field.name for field in dataclasses.fields(TrainingArguments)} | {"attn_implementation"}
    return names | set(inspect.signature(RealTrainer).parameters)


def of_lightning() -> set[str]:
    from lightning import Trainer as RealTrainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import AdamW

    kinds = (RealTrainer, ModelCheckpoint, DistributedDataParallel, AdamW)
    return {name for kind in kinds for name in inspect.signature(kind).parameters} | {"prog_bar"}


def of_accelerate() -> set[str]:
    from accelerate import Accelerator, DataLoaderConfiguration  # type: ignore[import-untyped]
    from accelerate.utils import DistributedDataParallelKwargs  # type: ignore[import-untyped]

    kinds = (Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs)
    return {name for kind in kinds for name in inspect.signature(kind).parameters}


def of_timm() -> set[str]:
    folder = folder_of("timm")
    names = parameters_in(folder / "data" / "loader.py", "create_loader")
    names |= parameters_in(folder / "optim" / "_optim_factory.py", "create_optimizer_v2")
    assert "enable" in parameters_in(folder / "layers" / "config.py", "set_fused_attn")
    return names


def of_ultralytics() -> set[str]:
    return set(re.findall(r"^(\w+):", (folder_of("ultralytics") / "cfg" / "default.yaml").read_text(), re.MULTILINE))


def of_torchtitan() -> set[str]:
    return fields_in(folder_of("torchtitan"))


REAL: dict[str, tuple[str, Callable[[], set[str]]]] = {
    "Transformers": ("transformers", of_transformers),
    "Lightning": ("lightning", of_lightning),
    "Accelerate": ("accelerate", of_accelerate),
    "timm": ("timm", of_timm),
    "Ultralytics": ("ultralytics", of_ultralytics),
    "torchtitan": ("torchtitan", of_torchtitan),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_the_real_package_has_every_option(name: str) -> None:
    package, known = REAL[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    trainer = BY_NAME[name]
    codes = [trainer.call.format(options=option) for option in trainer.flags.values()]
    codes += [code.split("#")[0] for code in trainer.rules.values()]

    used = {word for code in codes for word in keywords_of(code)}
    assert used
    assert used - known() == set()
