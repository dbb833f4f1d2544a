"""Recording inside Lightning, Transformers and Accelerate, with the real packages and tiny models, on a CPU."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import stepscope
from stepscope.trace import Trace

torch = pytest.importorskip("torch")

LIGHTNING = os.environ.get("STEPSCOPE_LIGHTNING", "lightning.pytorch")
"""The other name of the package is pytorch_lightning."""
STEPS = 12
SHORT = {"skip_first": 2, "warmup": 1, "active": 3, "repeat": 1}


def schedule() -> Any:
    return stepscope.schedule(**SHORT)


def step_numbers(trace: Trace) -> list[int]:
    return sorted(trace.annotations["step"].drop_nulls().unique().to_list())


def names(trace: Trace) -> set[str]:
    return set(trace.annotations["name"].to_list())


class Data(torch.utils.data.Dataset):
    """Pairs of random vectors and their sums."""

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        x = torch.full((8,), float(index))
        return x, x.sum()[None]


class TestLightning:
    @pytest.fixture(autouse=True)
    def package(self) -> Any:
        return pytest.importorskip(LIGHTNING)

    def module(self, *, breaks_at: int = -1) -> Any:
        lightning = import_module(LIGHTNING)

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(8, 1)

            def training_step(self, batch: Any, index: int) -> Any:
                if index == breaks_at:
                    raise ZeroDivisionError
                return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

            def validation_step(self, batch: Any, index: int) -> Any:
                return self.layer(batch[0]).sum()

            test_step = validation_step

            def predict_step(self, batch: Any, index: int) -> Any:
                return self.layer(batch[0])

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=1e-6)

        return Module()

    def trainer(self, folder: Path, **more: Any) -> Any:
        lightning = import_module(LIGHTNING)

        return lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **more,
        )

    def loader(self) -> Any:
        return torch.utils.data.DataLoader(Data(), batch_size=2)

    def test_the_profiler_records_steps_and_actions(self, tmp_path: Path) -> None:
        from stepscope.integrations.lightning import StepscopeProfiler

        profiler = StepscopeProfiler(tmp_path / "trace.json.gz", schedule=schedule())
        self.trainer(tmp_path, profiler=profiler).fit(self.module(), self.loader(), self.loader())

        [path] = profiler.traces
        trace = stepscope.open_trace(path)
        assert step_numbers(trace) == [3, 4, 5]
        assert "run_training_batch" in names(trace)
        assert any(name.endswith("TrainingEpochLoop].train_dataloader_next") for name in names(trace))
        assert "run_training_epoch" not in names(trace)
        assert profiler.summary() == f"stepscope diagnose {path}"
        batches = trace.annotations.filter(trace.annotations["name"] == "run_training_batch")
        assert batches.height == 3
        assert not torch.autograd.profiler._is_profiler_enabled
        assert stepscope.diagnose(trace).steps["index"].to_list() == [3, 4, 5]

    def test_the_callback_records_steps_beside_lightnings_own_profiler(self, tmp_path: Path) -> None:
        from stepscope.integrations.lightning import StepscopeCallback

        callback = StepscopeCallback(tmp_path / "trace.json.gz", schedule=schedule())
        trainer = self.trainer(tmp_path, callbacks=[callback], profiler="simple")
        trainer.fit(self.module(), self.loader())

        assert step_numbers(stepscope.open_trace(callback.traces[0])) == [3, 4, 5]
        assert "run_training_batch" in trainer.profiler.recorded_durations

    @pytest.mark.parametrize("kind", ["validate", "test", "predict"])
    @pytest.mark.parametrize("as_profiler", [True, False], ids=["profiler", "callback"])
    def test_other_loops(self, tmp_path: Path, kind: str, as_profiler: bool) -> None:
        from stepscope.integrations.lightning import StepscopeCallback, StepscopeProfiler

        hook = (StepscopeProfiler if as_profiler else StepscopeCallback)(tmp_path / "t.json.gz", schedule=schedule())
        trainer = self.trainer(tmp_path, **({"profiler": hook} if as_profiler else {"callbacks": [hook]}))
        getattr(trainer, kind)(self.module(), self.loader())

        assert step_numbers(stepscope.open_trace(hook.traces[0])) == [3, 4, 5]

    def test_it_does_not_fight_lightnings_pytorch_profiler(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from stepscope.integrations.lightning import StepscopeCallback

        callback = StepscopeCallback(tmp_path / "ours.json.gz", schedule=schedule())
        theirs = import_module(f"{LIGHTNING}.profilers").PyTorchProfiler(
            dirpath=tmp_path, filename="theirs", export_to_chrome=True
        )
        self.trainer(tmp_path, callbacks=[callback], profiler=theirs).fit(self.module(), self.loader())

        assert callback.traces == ()
        assert "the trainer's PyTorchProfiler already records" in capsys.readouterr().err
        [found] = tmp_path.glob("*theirs*.json")
        assert len(step_numbers(stepscope.open_trace(found))) > 0

    @pytest.mark.parametrize("as_profiler", [True, False], ids=["profiler", "callback"])
    def test_a_training_that_breaks_keeps_what_was_recorded(self, tmp_path: Path, as_profiler: bool) -> None:
        from stepscope.integrations.lightning import StepscopeCallback, StepscopeProfiler

        hook = (StepscopeProfiler if as_profiler else StepscopeCallback)(tmp_path / "t.json.gz", schedule=schedule())
        trainer = self.trainer(tmp_path, **({"profiler": hook} if as_profiler else {"callbacks": [hook]}))
        with pytest.raises(ZeroDivisionError):
            trainer.fit(self.module(breaks_at=4), self.loader())

        assert step_numbers(stepscope.open_trace(hook.traces[0])) == [3, 4]
        assert not torch.autograd.profiler._is_profiler_enabled

    def test_a_training_that_is_too_short_says_so(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from stepscope.integrations.lightning import StepscopeCallback

        callback = StepscopeCallback(tmp_path / "trace.json.gz")
        self.trainer(tmp_path, callbacks=[callback], limit_train_batches=4).fit(self.module(), self.loader())

        assert callback.traces == ()
        assert "nothing of Lightning was recorded: it ended after 4 steps" in capsys.readouterr().err

    def test_the_same_profiler_may_train_twice_and_be_copied(self, tmp_path: Path) -> None:
        from stepscope.integrations.lightning import StepscopeProfiler

        profiler = StepscopeProfiler(tmp_path, schedule=schedule())
        for _ in range(2):
            self.trainer(tmp_path, profiler=profiler).fit(self.module(), self.loader())
        again = copy.deepcopy(StepscopeProfiler(tmp_path / "other.json"))

        assert [path.name for path in profiler.traces] == ["trace-1.json.gz", "trace-2.json.gz"]
        assert again.traces == ()
        assert pickle.loads(pickle.dumps(again)).traces == ()

    def test_a_file_that_is_no_trace_is_refused_at_once(self) -> None:
        from stepscope.integrations.lightning import StepscopeProfiler

        with pytest.raises(stepscope.StepscopeError, match="out is a file that ends in"):
            StepscopeProfiler("trace.txt")


class TestTransformers:
    @pytest.fixture(autouse=True)
    def package(self) -> Any:
        return pytest.importorskip("transformers")

    def train(self, folder: Path, callbacks: list[Any], **more: Any) -> Any:
        import transformers

        config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2)
        settings = {
            "output_dir": str(folder / "output"),
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            "logging_strategy": "no",
            **more,
        }
        data = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 64
        trainer = transformers.Trainer(
            transformers.GPT2LMHeadModel(config),
            transformers.TrainingArguments(**settings),
            train_dataset=data,
            callbacks=callbacks,
        )
        trainer.train()
        return trainer

    def test_steps_are_recorded(self, tmp_path: Path) -> None:
        from stepscope.integrations.transformers import StepscopeCallback

        callback = StepscopeCallback(tmp_path / "trace.json.gz", schedule=schedule())
        self.train(tmp_path, [callback])

        trace = stepscope.open_trace(callback.traces[0])
        assert step_numbers(trace) == [3, 4, 5]
        assert sum("Optimizer.step#" in name for name in trace.annotations["name"].to_list()) == 3

    def test_a_step_is_an_update_of_the_weights(self, tmp_path: Path) -> None:
        from stepscope.integrations.transformers import StepscopeCallback

        callback = StepscopeCallback(tmp_path / "trace.json.gz", schedule=schedule())
        self.train(tmp_path, [callback], gradient_accumulation_steps=3)

        trace = stepscope.open_trace(callback.traces[0])
        losses = trace.operators.filter(trace.operators["name"] == "aten::cross_entropy_loss")
        assert (step_numbers(trace), losses.height) == ([3, 4, 5], 9)

    def test_it_gives_way_to_a_profiler_around_the_training(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from stepscope.integrations.transformers import StepscopeCallback

        callback = StepscopeCallback(tmp_path / "trace.json.gz")
        with torch.profiler.profile() as theirs:
            self.train(tmp_path, [callback], max_steps=2)

        assert callback.traces == ()
        assert "the Trainer is not recorded" in capsys.readouterr().err
        assert len(theirs.events()) > 0


class TestAccelerate:
    """Its loops are the user's own: stepscope.profile stands in them as in plain PyTorch."""

    @pytest.fixture(autouse=True)
    def package(self) -> Any:
        return pytest.importorskip("accelerate")

    def steps(self, accelerator: Any) -> Iterator[None]:
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        loader = torch.utils.data.DataLoader(Data(), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                yield

    def test_a_profile_block_in_its_loop(self, tmp_path: Path) -> None:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        when = stepscope.schedule(skip_first=1, warmup=1, active=2, repeat=1)
        with stepscope.profile(tmp_path / "trace.json.gz", schedule=when) as block:
            for _ in self.steps(accelerator):
                block.step()

        trace = stepscope.open_trace(block.traces[0])
        updates = trace.annotations["name"].str.starts_with("Optimizer.step#").sum()
        assert (step_numbers(trace), updates) == ([2, 3], 2)

    def test_what_its_own_profiler_writes_is_read(self, tmp_path: Path) -> None:
        from accelerate import Accelerator
        from accelerate.utils import ProfileKwargs

        handler = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        with accelerator.profile() as profiler:
            for _ in self.steps(accelerator):
                profiler.step()

        [path] = tmp_path.glob("*.json")
        assert stepscope.diagnose(stepscope.open_trace(path)).step_count > 1


@pytest.mark.parametrize(("module", "package"), [("lightning", "lightning"), ("transformers", "transformers")])
def test_without_the_package_one_sentence_says_what_is_missing(tmp_path: Path, module: str, package: str) -> None:
    for name in ("lightning", "pytorch_lightning", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise ImportError\n")
    program = f"import stepscope.integrations.{module}"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
    assert done.stderr.strip().endswith(f"pip install {package}")
