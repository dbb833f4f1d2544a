"""The campaign for a GPU runs without one, from the script to the pages that quote its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from benchmarks import gpu_results
from benchmarks.gpu_campaign.plan import PARTS, REPOSITORY, chosen
from benchmarks.gpu_campaign.results import problems

pytest.importorskip("torch")
FEW = (
    "environment/machine",
    "tests/all",
    "faults/attention_written_out",
    "remedies/tune",
    "prediction/gpt2_decoding",
    "prediction/sweep",
    "overhead/launch",
)
"""An item of each part; STEPSCOPE_ZOO=all runs all of them, which takes minutes."""
ONLY = [] if os.environ.get("STEPSCOPE_ZOO") == "all" else [word for name in FEW for word in ("--only", name)]


def campaign(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(REPOSITORY / "scripts" / "gpu_campaign"), "--out", str(out), *words],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )


def test_a_dry_run_does_every_part_and_its_results_are_kept_and_quoted(tmp_path: Path) -> None:
    out, kept, docs = tmp_path / "out", tmp_path / "kept", tmp_path / "docs"

    done = campaign(out, "--dry-run", *ONLY)

    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((out / "summary.json").read_text())
    expected = {item.path for item in chosen(ONLY[1::2], is_dry=True)}
    assert {path.partition("/")[0] for path in summary["items"]} == set(PARTS)
    assert {path for path, item in summary["items"].items() if item["outcome"] in ("done", "skipped")} == expected
    assert list(problems(out)) == []
    assert pl.read_parquet(out / "sweep.parquet")["kind"].n_unique() == 5
    page = (out / "summary.md").read_text()
    assert page.splitlines()[0].endswith("(dry run: the figures mean nothing)")
    assert "could not be put into words" not in page

    again = campaign(out, "--dry-run", *ONLY)  # nothing is left to do
    assert again.returncode == 0
    assert " in " not in again.stdout.partition("|")[0]
    assert campaign(out, "--device", "cuda:0").returncode == 2

    docs.mkdir()
    for name in ("accuracy.md", "prediction-model.md"):
        (docs / name).write_text((REPOSITORY / "docs" / name).read_text())
    device = gpu_results.keep(out, kept)
    assert gpu_results.taken(device) < gpu_results.MOST_BYTES
    assert str(tmp_path) not in (device / "summary.json").read_text()
    assert len(gpu_results.renew(docs, kept)) == 2
    assert "| attention_written_out | unfused-attention |" in (docs / "accuracy.md").read_text()
    assert gpu_results.renew(docs, kept) == []


def test_pages_quote_what_is_kept_of_devices() -> None:
    devices = gpu_results.of_devices(REPOSITORY / "benchmarks" / "results")
    quoted = set()
    for page in sorted((REPOSITORY / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        quoted |= {found[2] for found in gpu_results._BLOCK.finditer(text)}
        assert (
            gpu_results.renewed(text, devices, "../" * (len(page.relative_to(REPOSITORY / "docs").parts) - 1)) == text
        )
    assert quoted == set(gpu_results.BLOCKS)
    assert not any(each.about.get("is_dry") for each in devices)
    assert all(gpu_results.taken(each.folder) <= gpu_results.MOST_BYTES for each in devices)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "nothing"], "there is no part or item 'nothing'"),
        (["--only", "environment/machine", "--device", "cuda:77"], "sees no GPU"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], message: str, tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available() and "77" in words[-1]:
        pytest.skip("there is a GPU")
    done = campaign(tmp_path / "out", *words)

    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "summary.json").exists()
