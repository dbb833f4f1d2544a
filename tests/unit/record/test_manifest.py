"""`run.json`: what it holds, and above all what it does not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from stepscope.record.manifest import (
    RunManifest,
    git_difference,
    git_state,
    rank_and_world_size,
    speed_environment,
    without_secrets,
)

PLANTED = "planted-secret-value"
SECRET_NAMES = """
    AWS_SECRET_ACCESS_KEY WANDB_API_KEY HF_TOKEN GITHUB_TOKEN DATABASE_URL USER TORCH_TOKEN NCCL_AUTH CUDA_LICENSE_KEY
    PYTORCH_PASSWORD TORCHX_CREDENTIALS XLA_SECRET_ID TORCHELASTIC_API_KEY PYTORCH_COOKIE TRITON_PWD"""
SECRETS = dict.fromkeys(SECRET_NAMES.split(), PLANTED)
DISGUISED = {
    "TORCH_MIRROR": f"https://alice:{PLANTED}@example.org/wheels",
    "PYTORCH_HEADER": f"Bearer {PLANTED}",
    "TORCH_HUB": "ghp_" + "a1b2c3d4e5f6g7h8",
    "NCCL_NOTE": "AKIA" + "ABCDEFGHIJKLMNOP",
}
SPEED = {
    "CUDA_VISIBLE_DEVICES": "0,1",
    "CUDA_LAUNCH_BLOCKING": "1",
    "NCCL_DEBUG": "INFO",
    "OMP_NUM_THREADS": "4",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_HOME": "/home/alice/torch",
}


def test_an_empty_environment() -> None:
    assert speed_environment({}) == {}


def test_only_what_matters_to_speed_is_kept_and_never_a_secret() -> None:
    assert speed_environment({**SECRETS, **DISGUISED, **SPEED}) == SPEED


def test_redacted_it_tells_no_folder() -> None:
    without = {name: value for name, value in SPEED.items() if name != "TORCH_HOME"}
    assert speed_environment(SPEED, redact=True) == without


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("exit_code", "x"),
        ("exit_code", 2**40),
        ("started_unix_s", float("nan")),
        ("ended_unix_s", 1e300),
        ("versions", ["torch"]),
        ("environment", {"RANK": 0}),
        ("devices", "T4"),
        ("git", 3),
        ("recordings", [7]),
        ("applied", "fused"),
    ],
)
def test_what_makes_no_sense_is_left_out(name: str, value: object) -> None:
    whole = RunManifest(command=("x",), exit_code=0, started_unix_s=5.0).to_json()
    whole = json.loads(json.dumps(whole))
    known, _ = RunManifest.from_json({key: kept for key, kept in whole.items() if key != name})

    assert RunManifest.from_json({**whole, name: value}) == (known, False)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ([], []),
        (["train.py", "--lr", "3e-4"], ["train.py", "--lr", "3e-4"]),
        (["train.py", "--api-key", PLANTED, "--lr", "1"], ["train.py", "--api-key", "***", "--lr", "1"]),
        (["train.py", f"--wandb_token={PLANTED}"], ["train.py", "--wandb_token=***"]),
        (["env", f"DB_PASSWORD={PLANTED}", "x.py"], ["env", "DB_PASSWORD=***", "x.py"]),
        (["x.py", f"s3://key:{PLANTED}@host/x"], ["x.py", "***"]),
        (["x.py", f"--data=https://u:{PLANTED}@host"], ["x.py", "--data=***"]),
        (["x.py", "--tokenizer", "gpt2", "--max-tokens=9"], ["x.py", "--tokenizer", "gpt2", "--max-tokens=9"]),
        (["x.py", "--use-token", "--lr", "1"], ["x.py", "--use-token", "--lr", "1"]),
        (["x.py", "--key", "-hidden"], ["x.py", "--key", "***"]),
    ],
)
def test_a_command_is_shown_without_secrets(command: list[str], shown: list[str]) -> None:
    assert without_secrets(command) == shown


def test_the_whole_manifest_holds_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {**SECRETS, **DISGUISED}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    begun = RunManifest.begin(["train.py", "--token", PLANTED], 5.0, options={"steps": 3}, redact=False)
    text = json.dumps(begun.to_json())

    assert PLANTED not in text
    assert not any(value in text for value in DISGUISED.values())
    assert (begun.folder, begun.started_unix_s, begun.options) == (str(tmp_path), 5.0, {"steps": 3})


def test_redacted_it_names_no_machine_and_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    begun = RunManifest.begin(["/home/alice/x.py", "--data=/home/alice/d"], 5.0, options={}, redact=True)

    assert (begun.host, begun.folder, begun.command) == (None, None, ("x.py", "--data=d"))


def test_there_and_back_again_with_keys_of_later_versions() -> None:
    recordings = [{"rank": 0, "steps": 5, "facts": {"versions": {"torch": "2"}, "devices": ["T4"], "environment": {}}}]
    ended = RunManifest(command=("x",), versions={"stepscope": "1"}).ended(9.0, 3, recordings)

    assert ended.versions == {"stepscope": "1", "torch": "2"}
    assert (ended.devices, ended.exit_code, ended.recordings) == (("T4",), 3, ({"rank": 0, "steps": 5},))
    assert RunManifest.from_json(json.loads(json.dumps({**ended.to_json(), "later": 1}))) == (ended, True)


@pytest.mark.parametrize(
    ("command", "begins"),
    [
        ((), "run-"),
        (("python", "a/b/train me.py"), "train-me-"),
        (("python", "-m", "pkg.train"), "train-"),
        (("/usr/bin/torchrun",), "torchrun-"),
        (("...",), "run-"),
    ],
)
def test_suggested_names(command: tuple[str, ...], begins: str) -> None:
    assert RunManifest(command=command).suggested_name().startswith(begins)


def test_git(tmp_path: Path) -> None:
    assert git_state(tmp_path / "missing") is None

    def git(*words: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    state = git_state(tmp_path)
    assert state is not None
    assert (len(state["commit"]), state["dirty"]) == (40, False)
    (tmp_path / "a").write_text("2")
    stat = "a | 2 +-; 1 file changed, 1 insertion(+), 1 deletion(-)"
    assert git_state(tmp_path) == {**state, "dirty": True, "changes": stat}
    assert git_state(tmp_path, redact=True) == {**state, "dirty": True, "changes": stat.removeprefix("a | 2 +-; ")}
    git("commit", "-a", "-m", "b")
    later = git_state(tmp_path)
    assert later is not None
    assert git_difference(tmp_path, state["commit"], later["commit"]) == stat.removeprefix("a | 2 +-; ")
    assert git_difference(tmp_path, later["commit"], later["commit"][:12]) == "no difference"
    assert git_difference(tmp_path, later["commit"], "0" * 40) is None
    assert git_difference(tmp_path, later["commit"], "--output=b") is None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, (3, 8)),
        ({"LOCAL_RANK": "1"}, (1, 2)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, (2, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"RANK": "many", "WORLD_SIZE": ""}, (0, 1)),
    ],
)
def test_rank(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: tuple[int, int]) -> None:
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert rank_and_world_size() == expected
