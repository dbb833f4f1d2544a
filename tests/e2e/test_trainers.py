"""Programs of libraries that run the training loop: findings name the library's module and its own option."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import run_here, run_stepscope

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

TRANSFORMERS = """
import transformers
rows = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 64
config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=64, n_layer=2, n_head=2)
settings = transformers.TrainingArguments("out", max_steps=40, report_to="none", use_cpu=True, disable_tqdm=True,
    save_strategy="no", optim="adamw_torch", per_device_train_batch_size=2, logging_steps=1)
transformers.Trainer(transformers.GPT2LMHeadModel(config), settings, train_dataset=rows).train()
"""
LIGHTNING = """
import lightning, torch
class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(12)])
    def training_step(self, batch, index):
        return self.layers(batch).square().mean()
    def validation_step(self, batch, index):
        self.layers(batch)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), foreach=False)
rows = torch.utils.data.DataLoader(torch.randn(400, 64), batch_size=4)
lightning.Trainer(max_steps=40, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False).fit(Net(), rows, rows)
"""
ACCELERATE = """
import accelerate, torch
model = torch.nn.Linear(64, 64)
rows = torch.utils.data.DataLoader(torch.randn(400, 64), batch_size=4)
accelerator = accelerate.Accelerator(cpu=True)
model, optimizer, rows = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), rows)
for batch in rows:
    optimizer.zero_grad()
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
"""


def recorded(package: str, program: str, folder: Path) -> tuple[dict[str, Any], str]:
    """The diagnosis of a program as JSON, and the name of its library."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    from stepscope.diagnosis.view import View
    from stepscope.readers import open_trace
    from stepscope.record.run_folder import RunFolder

    (folder / "train.py").write_text(program)
    done = run_stepscope(
        "run", "--exit-after", "--no-diagnose", "--folder", folder / "runs", folder / "train.py",
        folder=folder, STEPSCOPE_DATA_DIR=str(folder / "data"),
    )  # fmt: skip
    assert done.code == 0, done.err
    [trace] = (folder / "runs").glob("*/rank0/trace-1.json.gz")
    [left] = RunFolder(trace.parents[1]).recordings()
    assert (left["source"], left["steps"]) == ("optimizer", 5)
    trainer = View(open_trace(trace, cache=None)).trainer
    # which remedy is told, not whether the saving is large enough on a busy machine
    report = run_here("diagnose", trace, "--set", "single-tensor-optimizer.share_on_cpu=0", "--json", "-").json()
    return report, trainer.name if trainer is not None else ""


def remedy_of(report: dict[str, Any], rule: str) -> str:
    return next((str(each["remedy"]["code"]) for each in report["findings"] if each["rule"] == rule), "")


def test_transformers(tmp_path: Path) -> None:
    report, name = recorded("transformers", TRANSFORMERS, tmp_path)

    assert name == "Transformers"
    assert 'optim="adamw_torch_fused"' in remedy_of(report, "single-tensor-optimizer")
    places = [place for finding in report["findings"] for place in finding["where"]]
    assert all(Path(place["file"]).name == "train.py" for place in places)


def test_lightning(tmp_path: Path) -> None:
    report, name = recorded("lightning", LIGHTNING, tmp_path)

    assert name == "Lightning"
    assert "configure_optimizers" in remedy_of(report, "single-tensor-optimizer")


def test_accelerate(tmp_path: Path) -> None:
    _, name = recorded("accelerate", ACCELERATE, tmp_path)

    assert name == "Accelerate"
