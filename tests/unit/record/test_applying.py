"""Remedies applied to a process: what is patched, what is said of it, and that everything else stays."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import json
import os
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

import stepscope.diagnosis
from stepscope.errors import UsageError
from stepscope.record.apply import all_flags, applied_outcomes, environment_of, install, parse_applications
from stepscope.record.apply.flags import Outcome, applied_beside, flag_rows, outcomes
from stepscope.record.apply.patching import Applying, in_a_line
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder
from tests.unit.applying import Start, applied
from tests.unit.hand_built import full
from tests.unit.rendered import json_report, markdown_report, text_report

RULES = Path(stepscope.diagnosis.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "remedies" / "applying.md"


@pytest.fixture
def start() -> Iterator[Start]:
    """Applies a list to this process until the test ends."""
    with applied() as begin:
        yield begin


def said(applying: Applying, *, applied: bool = True) -> list[str]:
    """The sentences so far, with this file's line numbers as N."""
    entries = applying.to_json()["applied" if applied else "not_applied"]
    return [re.sub(r"(test_applying\.py):\d+", r"\1:N", f"{each['flag']}: {each['sentence']}") for each in entries]


class TestLists:
    def test_words_come_once_in_their_order_without_defaults(self) -> None:
        assert parse_applications(" fuse-optimizer, workers=04,compile=default,quiet-progress=7,fuse-optimizer") == (
            "fuse-optimizer",
            "workers=4",
            "compile",
            "quiet-progress=7",
        )

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("", "the list of what to apply has an empty entry"),
            ("bf16,", "the list of what to apply has an empty entry"),
            (
                "fuse-optimiser",
                "there is no 'fuse-optimiser' to apply; did you mean fuse-optimizer? "
                "(stepscope run --apply list shows all)",
            ),
            ("bf16,fp16", "bf16 and fp16 cannot be applied together"),
            ("workers", "workers needs a value: workers=N"),
            ("workers=2,workers=3", "workers is given twice, as 2 and as 3"),
            ("workers=-1", "workers must be a whole number of at least 0, not '-1'"),
            ("workers=1000000", "workers must be at most 1,024, not 1000000"),
            ("prefetch=0", "prefetch must be a whole number of at least 1, not '0'"),
            ("workers=1234567890", "workers must be a whole number of at least 0, not '1234567890'"),
            ("workers=²", "workers must be a whole number of at least 0, not '²'"),
            ("compile=fast", "compile must be one of default, reduce-overhead, max-autotune, not 'fast'"),
            ("pin-memory=yes", "pin-memory takes no value, but 'yes' was given"),
            ("workers=0,prefetch=2", "prefetch takes workers, and workers=0 leaves none"),
        ],
    )
    def test_a_mistake_is_one_sentence(self, text: str, sentence: str) -> None:
        with pytest.raises(UsageError) as raised:
            parse_applications(text)

        assert sentence in str(raised.value)

    def test_the_page_has_every_flag_as_it_is(self) -> None:
        assert f"\n|---|---|---|\n{flag_rows(all_flags())}\n" in PAGE.read_text()  # scripts/generate_docs writes it
        assert len({flag.name for flag in all_flags()}) == len(all_flags())

    def test_what_rules_advise_can_be_applied(self) -> None:
        rules = "".join(path.read_text() for path in RULES.rglob("*.py"))
        words = {
            re.sub(r"\{[^}]*\}", "2", word)
            for words in re.findall(r"\bapply=\(([^)]*)\)", rules)
            for word in re.findall(r'"([^"]+)"', words)
        }

        assert len(words) > 15
        for word in words:
            assert parse_applications(word)

    def test_the_environment_is_changed_only_where_asked(self) -> None:
        variables = {"PATH": "/bin", "CUDA_LAUNCH_BLOCKING": "1", "TORCH_DISTRIBUTED_DEBUG": "OFF"}

        assert environment_of(("fuse-optimizer", "workers=2"), variables) == variables
        assert environment_of(("threads=3",), variables) == {
            **variables,
            "OMP_NUM_THREADS": "3",
            "MKL_NUM_THREADS": "3",
        }
        assert environment_of(("no-debug",), variables) == {
            "PATH": "/bin",
            "TORCH_DISTRIBUTED_DEBUG": "OFF",
            "STEPSCOPE_APPLIED_NO_DEBUG": "CUDA_LAUNCH_BLOCKING",
        }


UNSEEN = {"bf16": "no module was called", "workers": "no DataLoader was made"}


class TestOutcomes:
    def test_what_one_process_never_saw_is_said_only_if_none_did(self) -> None:
        nothing = {"flag": "workers", "sentence": "no DataLoader was made"}
        launcher = {
            "rank": 0,
            "applied": [],
            "not_applied": [nothing, {"flag": "bf16", "sentence": "no module was called"}],
        }
        worker = {"rank": 0, "applied": [{"flag": "workers", "sentence": "it has 2"}], "not_applied": []}

        assert outcomes(["workers=2", "bf16"], [launcher, worker], UNSEEN) == [
            Outcome("workers", "it has 2", True),
            Outcome("bf16", "no module was called", False),
        ]

    def test_ranks_are_named_where_they_differ(self) -> None:
        records = [
            {"rank": rank, "applied": [{"flag": "bf16", "sentence": text}], "not_applied": []}
            for rank, text in [(0, "both"), (0, "one"), (1, "both")]
        ]

        found = outcomes(["bf16"], records, UNSEEN)

        assert [each.text for each in found] == ["bf16: both", "bf16: one (rank 0)"]

    def test_without_a_process_with_torch_nothing_was_applied(self) -> None:
        [found] = outcomes(["bf16"], [], UNSEEN)

        assert found.text == "bf16, not applied: no process of the program imported torch"

    def test_a_process_writes_what_it_did_and_a_helper_does_not(self, tmp_path: Path) -> None:
        folder = RunFolder.create(tmp_path, "run", RunManifest(("train.py",)))
        applying = install(("no-debug", "zero-grad", "bf16"), folder)
        try:
            with torch.autograd.detect_anomaly(check_nan=False):
                pass
            child = os.fork()
            if child == 0:
                applying.end()
                os._exit(0)
            os.waitpid(child, 0)
            applying.end()
        finally:
            applying.remove()

        [file] = (folder.path / "rank0").iterdir()
        assert file.name == f"applied-{os.getpid()}.json"
        assert json.loads(file.read_text())["not_applied"] == [
            {"flag": "zero-grad", "sentence": "no zero_grad was called"},
            {"flag": "bf16", "sentence": "no module with parameters was called"},
        ]
        assert [each.flag for each in applied_outcomes(("no-debug", "zero-grad", "bf16"), folder) if each.applied] == [
            "no-debug"
        ]

    def test_a_rank_stays_one_when_its_group_is_destroyed(self, tmp_path: Path) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        folder = RunFolder.create(tmp_path, "run", RunManifest(("train.py",)))
        applying = install(("zero-grad",), folder)
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
        try:
            optimizer.zero_grad(False)
            torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
            optimizer.zero_grad(False)
            torch.distributed.destroy_process_group()
            optimizer.zero_grad()
        finally:
            applying.remove()

        assert [path.parent.name for path in folder.path.glob("rank*/applied-*.json")] == ["rank1"]
        assert len(said(applying)) == 2

    def test_a_damaged_file_is_passed_over(self, tmp_path: Path) -> None:
        folder = RunFolder.create(tmp_path, "run", RunManifest(("train.py",)))
        for number, text in enumerate(["{", "[]", '{"applied": 3}', '{"applied": [1, {"flag": "bf16"}]}', "[" * 99999]):
            (folder.rank_folder(0) / f"applied-{number}.json").write_text(text)

        [found] = applied_outcomes(("bf16",), folder)

        assert not found.applied


def test_a_diagnosis_of_a_run_says_what_was_applied(tmp_path: Path) -> None:
    entries = [
        {"flag": "bf16", "sentence": "Net computes <so>", "applied": True},
        {"flag": "workers", "sentence": "no DataLoader was made", "applied": False, "ranks": [1, 2]},
    ]
    folder = RunFolder.create(tmp_path, "run", RunManifest(("train.py",), applied=tuple(entries)))
    sentences = ("bf16: Net computes <so>", "workers, not applied: no DataLoader was made (rank 1, 2)")

    assert applied_beside(folder.path / "rank0" / "trace-1.json.gz") == sentences
    assert applied_beside(tmp_path / "elsewhere" / "trace.json") == ()
    (folder.path / "run.json").write_text('{"command": [], "applied": [1]}')
    assert applied_beside(folder.path / "rank0" / "trace-1.json.gz") == ()
    diagnosis = replace(full(), applied=sentences)
    assert json_report(diagnosis)["applied"] == list(sentences)
    assert "Applied to the program\n  - bf16: Net computes <so>\n" in text_report(
        diagnosis, width=100, colour=False, top=5
    )
    assert "## Applied to the program\n\n- bf16: Net computes &lt;so&gt;\n" in markdown_report(diagnosis, top=5)


def patched_things() -> dict[str, Any]:
    """Everything that a flag may replace."""
    from torch.optim.optimizer import _global_optimizer_pre_hooks
    from torch.utils.data import dataloader
    from torch.utils.data._utils import pin_memory
    from tqdm.std import tqdm

    owners: list[Any] = [
        *(DataLoader, dataloader._MultiProcessingDataLoaderIter, nn.Module, nn.Linear, torch.Tensor, pin_memory, tqdm),
        *(torch.optim.Optimizer, torch.optim.AdamW, torch.autograd, torch.nn.utils, functional, torch.amp.GradScaler),
        nn.parallel.DistributedDataParallel,
    ]
    found = {f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items()}
    found |= {name: getattr(torch, name) for name in ("set_anomaly_enabled", "set_num_threads")}
    return {**found, "hooks": list(_global_optimizer_pre_hooks)}


def test_nothing_stays_when_everything_is_removed() -> None:
    threads, allowed = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    tf32, benchmark = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    before = patched_things()
    every = ",".join(
        f"{flag.name}=1" if flag.value and flag.value.least is not None else flag.name
        for flag in all_flags()
        if flag.name not in ("fp16", "allocator")
    )
    applying = install(parse_applications(every), None)
    try:
        changed = {name for name, value in patched_things().items() if value is not before.get(name)}
        with torch.no_grad():
            nn.Linear(2, 2)(torch.ones(1, 2))
    finally:
        applying.remove()

    assert {"DataLoader.__init__", "Module.__call__", "Tensor.to", "Optimizer.zero_grad", "tqdm.__init__"} <= changed
    after = patched_things()
    assert {name for name, value in after.items() if value != before.get(name)} == set()
    assert set(after) == set(before)
    assert torch.get_num_threads() == threads
    assert torch.backends.cuda.matmul.allow_tf32 == allowed
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark) == (tf32, benchmark)


class Squares(Dataset[torch.Tensor]):
    """Ten numbers; where it is told to, it works only in the program's own process."""

    def __init__(self, *, only_at_home: bool = False) -> None:
        self.only_at_home = only_at_home

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.only_at_home and get_worker_info() is not None:
            raise RuntimeError("not in a worker")
        return torch.tensor(index * index)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def epochs(loader: DataLoader[Any], count: int = 2) -> list[list[int]]:
    """All that a loader gives, epoch by epoch, from the same seed."""
    torch.manual_seed(0)
    return [[int(value) for batch in loader for value in batch] for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no file '/home/alice/my data/x.py'.", "no file 'my data/x.py'"),
        ("C:\\Users\\bob\\a.py: gone", "a.py: gone"),
        ("see https://pytorch.org/docs/x.html", "see https://pytorch.org/docs/x.html"),
        ("1/2 of a/b", "1/2 of a/b"),
        ("", "ValueError"),
        ("long " * 99, ("long " * 40).strip()),
    ],
)
def test_a_reason_is_short_and_names_no_folder(text: str, shown: str) -> None:
    assert in_a_line(ValueError(text)) == shown


class TestLoaders:
    def test_workers_that_stay_give_the_batches_in_the_order_of_none(self, start: Start) -> None:
        before = epochs(DataLoader(Squares(), 3, True))
        applying = start("workers=1,prefetch=3,persistent-workers")

        loader = DataLoader(Squares(), 3, True)

        assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (1, 3, True)
        assert epochs(loader) == before
        assert said(applying) == [
            "workers: DataLoader made at test_applying.py:N has 1 worker instead of none",
            "prefetch: DataLoader made at test_applying.py:N has each worker prepare 3 batches ahead instead of 2",
            "persistent-workers: DataLoader made at test_applying.py:N keeps its workers from epoch to epoch",
        ]

    def test_the_flag_wins_over_what_the_program_chose(self, start: Start) -> None:
        applying = start("workers=0")

        loader = DataLoader(Squares(), num_workers=3, prefetch_factor=4, persistent_workers=True, timeout=9)

        assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (0, None, False)
        assert said(applying) == ["workers: DataLoader made at test_applying.py:N has no workers instead of 3"]

    def test_workers_that_fail_are_done_without_and_no_batch_is_lost(self, start: Start) -> None:
        before = epochs(DataLoader(Squares(), 3, True))
        applying = start("workers=1,persistent-workers")

        assert epochs(DataLoader(Squares(only_at_home=True), 3, True)) == before
        [sentence] = said(applying, applied=False)
        assert sentence.startswith(
            "workers: a DataLoader continues without them, since they fail: Caught RuntimeError in "
        )

    def test_a_mistake_of_the_programs_own_is_raised_as_ever(self, start: Start) -> None:
        start("workers=1")

        with pytest.raises(ValueError, match="batch_size should be a positive integer"):
            DataLoader(Squares(), batch_size=-1)

    def test_an_iterable_dataset_is_not_read_twice(self, start: Start) -> None:
        applying = start("workers=2")

        loader = DataLoader(Stream())

        assert loader.num_workers == 1
        assert said(applying, applied=False) == [
            "workers: DataLoader made at test_applying.py:N: its IterableDataset would yield each batch 2 times, once "
            "for each worker; it gets 1"
        ]

    def test_a_subclass_with_arguments_of_its_own_and_a_copy(self, start: Start) -> None:
        class Mine(DataLoader[Any]):
            def __init__(self, size: int) -> None:
                super().__init__(Squares(), size, False)

        start("workers=2,pin-memory")

        loader = Mine(4)

        assert (loader.batch_size, loader.num_workers) == (4, 2)
        assert pickle.loads(pickle.dumps(DataLoader(Squares()))).num_workers == 2
        assert list(inspect.signature(DataLoader.__init__).parameters)[1:3] == ["dataset", "batch_size"]

    def test_what_needs_workers_or_an_accelerator_is_refused_without(self, start: Start) -> None:
        applying = start("prefetch=3,persistent-workers,pin-memory")

        loader = DataLoader(Squares())

        assert not loader.persistent_workers
        expected = [
            "prefetch: DataLoader made at test_applying.py:N: it has no workers that could prepare batches ahead",
            "persistent-workers: DataLoader made at test_applying.py:N: it has no workers to keep",
        ]
        if not torch.cuda.is_available():
            expected.append("pin-memory: DataLoader made at test_applying.py:N: there is no accelerator to pin for")
        assert said(applying, applied=False) == expected


class Net(nn.Module):
    """Convolution, layer and dropout; notes the type that its layer computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.layer = nn.Linear(4, 5)
        self.seen: list[torch.dtype] = []

    def forward(self, images: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        scores = self.layer(self.convolution(images).mean((2, 3))) * scale
        self.seen.append(scores.dtype)
        return {"scores": scores, "both": (scores, [scores])}


def losses(steps: int = 4, **settings: Any) -> list[float]:
    """A seeded training."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, **settings)
    data = TensorDataset(torch.randn(8, 3, 6, 6), torch.randint(0, 5, (8,)))
    found = []
    for _ in range(steps):
        for images, targets in DataLoader(data, 4, shuffle=True):
            loss = functional.cross_entropy(net(images)["scores"], targets)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            found.append(loss.item())
    return found


class TestTraining:
    def test_losses_stay_what_they_were(self, start: Start) -> None:
        before = losses(foreach=False)
        applying = start("fuse-optimizer,zero-grad,clip-in-one-pass,channels-last,no-debug,non-blocking")

        after = losses(foreach=False)

        assert after == pytest.approx(before, rel=1e-5)
        assert said(applying) == [
            "channels-last: Net keeps the channels of its 1 convolution last",
            "zero-grad: zero_grad at test_applying.py:N now sets gradients to None",
            "clip-in-one-pass: gradients are clipped in one pass at test_applying.py:N",
            "fuse-optimizer: AdamW made at test_applying.py:N now runs fused",
        ]

    def test_an_optimizer_of_the_programs_own_says_why_it_is_not_fused(self, start: Start) -> None:
        class Mine(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.data -= group["lr"] * parameter.grad

        applying = start("fuse-optimizer")
        parameter = nn.Parameter(torch.ones(2))
        optimizer = Mine([parameter], lr=0.5)
        parameter.sum().backward()
        optimizer.step()

        assert parameter.tolist() == [0.5, 0.5]
        [sentence] = said(applying, applied=False)
        assert sentence.startswith("fuse-optimizer: Mine made at test_applying.py:N: Mine has a step of its own")

    def test_gradients_that_are_none_already_are_said_to_be(self, start: Start) -> None:
        applying = start("zero-grad")
        net = Net()
        net.zero_grad()
        torch.optim.SGD(net.parameters(), 0.1).zero_grad()

        assert said(applying, applied=False) == ["zero-grad: gradients are already set to None"]

    def test_clipping_that_is_to_raise_still_raises(self, start: Start) -> None:
        applying = start("clip-in-one-pass")
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.tensor([1.0, float("inf")])

        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_([parameter], 1.0, 2.0, True)

        assert said(applying, applied=False) == [
            "clip-in-one-pass: clip_grad_norm_ at test_applying.py:N: it asks for error_if_nonfinite"
        ]

    def test_a_large_loss_is_computed_in_blocks_with_the_same_gradient(self, start: Start) -> None:
        torch.manual_seed(0)
        scores, targets = torch.randn(128, 2048, requires_grad=True), torch.randint(0, 2048, (128,))
        targets[3] = -100
        before = functional.cross_entropy(scores, targets, label_smoothing=0.1)
        [expected] = torch.autograd.grad(before, scores)
        applying = start("chunked-loss")

        after = nn.CrossEntropyLoss(label_smoothing=0.1)(scores, targets)
        [gradient] = torch.autograd.grad(after, scores)

        torch.testing.assert_close(after, before)
        torch.testing.assert_close(gradient, expected)
        assert said(applying) == [
            "chunked-loss: the loss over 2,048 classes at test_applying.py:N is computed in blocks"
        ]

    def test_other_losses_are_computed_as_ever(self, start: Start) -> None:
        torch.manual_seed(0)
        scores, odds = torch.randn(128, 2048), torch.rand(128, 2048)
        images, pixels = torch.randn(2, 2048, 9, 9), torch.randint(0, 2048, (2, 9, 9))
        before = functional.cross_entropy(scores, odds), functional.cross_entropy(images, pixels, reduction="sum")
        applying = start("chunked-loss")

        assert (
            functional.cross_entropy(scores, odds),
            functional.cross_entropy(images, pixels, reduction="sum"),
        ) == before
        assert said(applying) == []


class TestPrecision:
    IMAGES = torch.ones(2, 3, 6, 6)

    def test_the_model_computes_in_bfloat16_and_returns_float32(self, start: Start) -> None:
        applying = start("bf16")
        net = Net()

        found = net(self.IMAGES, scale=2.0)
        functional.cross_entropy(found["scores"], torch.tensor([0, 1])).backward()
        with torch.no_grad():
            unlearned = net(self.IMAGES)

        assert net.seen == [torch.bfloat16, torch.bfloat16]
        kinds = {found["scores"].dtype, found["both"][0].dtype, found["both"][1][0].dtype, unlearned["scores"].dtype}
        assert kinds == {torch.float32}
        assert net.layer.weight.grad is not None
        assert net.layer.weight.grad.dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")
        assert said(applying) == ["bf16: Net called at test_applying.py:N computes under autocast to bfloat16"]

    def test_a_model_is_known_long_after_the_others_are_no_more_watched(self, start: Start) -> None:
        start("bf16")
        net, late = Net(), Net()
        for _ in range(70):
            net(self.IMAGES)
        late(self.IMAGES)

        assert {*net.seen, *late.seen} == {torch.bfloat16}
        assert nn.Module.__call__ is nn.Module._wrapped_call_impl

    def test_copies_signature_and_names_are_those_of_the_program(self, start: Start) -> None:
        start("bf16,channels-last")
        net = Net()
        names = list(net.state_dict())
        net(self.IMAGES)

        assert list(copy.deepcopy(net).state_dict()) == list(pickle.loads(pickle.dumps(net)).state_dict()) == names
        assert list(inspect.signature(net.forward).parameters) == ["images", "scale"]
        assert type(net) is Net

    def test_the_programs_own_autocast_is_left_alone(self, start: Start) -> None:
        applying = start("bf16")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            kept = Net()(self.IMAGES)["scores"].dtype

        assert kept == torch.bfloat16
        assert said(applying, applied=False) == ["bf16: the program calls Net under autocast to bfloat16 itself"]

    def test_a_model_of_lower_precision_is_left_alone(self, start: Start) -> None:
        applying = start("bf16")
        kept = Net().to(torch.bfloat16)(self.IMAGES.to(torch.bfloat16))["scores"].dtype

        assert kept == torch.bfloat16
        assert said(applying, applied=False) == ["bf16: the parameters of Net are already bfloat16"]

    def test_float16_is_trained_with_scaled_losses_and_gradients_that_are_not(self, start: Start) -> None:
        def gradients(passes: int = 2) -> list[torch.Tensor]:
            torch.manual_seed(0)
            net, extra = Net(), torch.ones(5, requires_grad=True)
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            for _ in range(passes):
                loss = (net(torch.randn(2, 3, 6, 6))["scores"] * extra).sum() * 1e-5
                (loss + net.layer.weight.square().sum() * 1e-5).backward()
            found = [each.grad.clone() for each in [*net.parameters(), extra]]  # type: ignore[union-attr]
            optimizer.step()
            kinds.extend(net.seen)
            return found

        kinds: list[torch.dtype] = []
        before = gradients()
        applying = start("fp16")
        after = gradients()
        applying.end()

        for one, other in zip(before, after, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-2, atol=1e-8)
        assert kinds == [torch.float32] * 2 + [torch.float16] * 2
        assert said(applying) == ["fp16: Net called at test_applying.py:N computes under autocast to float16"]

    def test_steps_whose_gradients_overflow_are_left_out_until_the_scale_fits(self, start: Start) -> None:
        applying = start("fp16")
        layer = nn.Linear(2, 1, bias=False)
        nn.init.ones_(layer.weight)
        optimizer = torch.optim.AdamW(layer.parameters(), 0.1, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        weights = []
        for _ in range(4):
            optimizer.zero_grad()
            (layer(torch.ones(4, 2)).sum() * 0.5).backward()  # float16 ends at 65,504; 4 * 0.5 * 65,536 is more
            optimizer.step()
            schedule.step()
            weights.append(round(layer.weight[0, 0].item(), 4))
        applying.end()

        assert weights == [1.0, 1.0, 0.9, 0.8]
        assert said(applying)[1:] == ["fp16: 2 of 4 steps were skipped: their gradients overflowed"]

    def test_a_scaler_of_the_programs_own_is_enough(self, start: Start) -> None:
        start("fp16")
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        layer = nn.Linear(2, 1)
        scaler.scale(layer(torch.ones(1, 2)).sum()).backward()

        assert layer.weight.grad is not None
        assert layer.weight.grad.tolist() == [[8.0, 8.0]]

    def test_recomputed_layers_compute_as_they_did(self, start: Start) -> None:
        from torch.utils.checkpoint import checkpoint

        class Recomputing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> Any:
                return checkpoint(self.layer, x, use_reentrant=False)

        applying = start("bf16")
        net = Recomputing()
        net(torch.ones(2, 4)).sum().backward()

        assert net.layer.weight.grad is not None
        assert len(said(applying)) == 1


@pytest.mark.slow
def test_a_model_that_cannot_be_compiled_goes_on(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(3, 3), nn.GELU()), torch.randn(2, 3)
    expected = model(data)
    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    monkeypatch.setattr(config, "force_disable_caches", True)
    applying = start("compile")

    for _ in range(2):
        torch.testing.assert_close(model(data), expected)

    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    assert said(applying) == ["compile: Sequential called at test_applying.py:N is compiled (mode default)"]
    [sentence] = said(applying, applied=False)
    assert sentence.startswith("compile: Sequential runs uncompiled: ")


def test_what_is_not_trained_is_not_compiled(start: Start) -> None:
    applying = start("compile")
    with torch.no_grad():
        nn.Linear(3, 3)(torch.ones(1, 3))
    frozen = nn.Linear(3, 3).requires_grad_(False)
    frozen(torch.ones(1, 3))
    applying.end()

    assert said(applying, applied=False) == ["compile: no module was called with gradients"]


def test_copies_without_an_accelerator_are_what_they_were(start: Start) -> None:
    applying = start("non-blocking")
    tensor = torch.ones(2)

    assert tensor.to(torch.float64).dtype == torch.float64
    assert tensor.to("cpu", torch.int32, False, True).dtype == torch.int32
    assert tensor.to(device="cpu") is tensor
    assert tensor.to(torch.ones(1, dtype=torch.int8), non_blocking=False).dtype == torch.int8
    assert tensor.to("meta", torch.float16, False).dtype == torch.float16
    with pytest.raises(RuntimeError, match="Invalid device string"):
        tensor.to("no such device")
    assert said(applying) == []


def test_a_bar_is_drawn_seldom(start: Start) -> None:
    from tqdm import tqdm

    def drawn() -> int:
        stream = io.StringIO()
        bar = tqdm(range(100), file=stream, mininterval=0, miniters=1)
        for number in bar:
            bar.set_postfix(loss=number)
        return stream.getvalue().count("\r")

    often = drawn()
    applying = start("quiet-progress=50")

    assert often >= 100
    assert drawn() <= 5  # at the beginning, after 50 and 100 steps, and at the end
    assert said(applying) == [
        "quiet-progress: the bar made at test_applying.py:N is redrawn after 50 steps at the earliest"
    ]


def test_debugging_aids_stay_off(start: Start) -> None:
    applying = start("no-debug")
    torch.autograd.set_detect_anomaly(True)
    enabled = torch.is_anomaly_enabled()
    with torch.autograd.detect_anomaly(check_nan=False):
        enabled = enabled or torch.is_anomaly_enabled()

    assert not enabled
    assert torch.autograd.gradcheck(lambda x: 1 / 0, torch.ones(1))
    assert [sentence.partition(" at ")[0] for sentence in said(applying)] == [
        "no-debug: anomaly detection requested",
        "no-debug: anomaly detection requested",
        "no-debug: gradcheck",
    ]


def test_threads_stay_what_they_are_to_be(start: Start) -> None:
    applying = start("threads=1")
    torch.set_num_threads(2)

    assert torch.get_num_threads() == 1
    assert said(applying) == [
        "threads: PyTorch computes with 1 thread",
        "threads: the program asks for 2 and still gets 1",
    ]


def test_garbage_is_collected_at_steps_alone(start: Start) -> None:
    applying = start("garbage-at-steps")
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], 0.1)
    gc.collect()
    collected: list[int] = []
    gc.callbacks.append(lambda phase, facts: collected.append(facts["generation"]) if phase == "start" else None)
    try:
        for step in range(51):
            optimizer.step()
            _ = [[step] for _ in range(2000)]  # so many would have made the collector run
        enabled = gc.isenabled()
    finally:
        gc.callbacks.pop()
    applying.remove()

    assert collected == [2, 2]  # at the first step, and fifty later
    assert (enabled, gc.isenabled()) == (False, True)
    assert said(applying) == ["garbage-at-steps: garbage is collected after every 50 steps, and not within them"]


def test_a_collector_that_the_program_turned_off_stays_off(start: Start) -> None:
    applying = start("garbage-at-steps")
    gc.disable()
    try:
        torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1).step()
        applying.remove()
        assert not gc.isenabled()
    finally:
        gc.enable()

    assert said(applying, applied=False) == ["garbage-at-steps: the program has turned the collector off itself"]


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_settings_of_data_parallel_training(start: Start) -> None:
    applying = start("bucket-mb=3,gradient-view,static-graph,no-find-unused")

    module = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), None, None, find_unused_parameters=True)

    assert module.bucket_bytes_cap == 3 * 2**20
    assert (module.gradient_as_bucket_view, module.static_graph, module.find_unused_parameters) == (True, True, False)
    name = "DistributedDataParallel made at test_applying.py:N"
    assert said(applying) == [
        f"bucket-mb: {name} reduces gradients in buckets of 3 MB instead of 25",
        f"gradient-view: {name} keeps gradients in its buckets",
        f"static-graph: {name} treats every step's graph as the same",
        f"no-find-unused: {name} does not look for unused parameters",
    ]


def test_a_family_that_cannot_be_installed_says_why(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.utils.data.dataloader, "_MultiProcessingDataLoaderIter")
    applying = start("workers=2,threads=1")

    assert DataLoader(Squares()).num_workers == 0
    assert said(applying, applied=False) == [
        "workers: module 'torch.utils.data.dataloader' has no attribute '_MultiProcessingDataLoaderIter'"
    ]
