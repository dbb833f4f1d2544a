"""action.yml: its steps run as GitHub runs them, with a server in place of GitHub's API."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
import yaml

from stepscope.commands.record.run import COMMAND as RUN
from tests.e2e.conftest import BATCHED, PER_TOKEN, environment

REPOSITORY: Final = Path(__file__).parents[2]
ACTION: Final = yaml.safe_load((REPOSITORY / "action.yml").read_text())
SHELL: Final = ["bash", "--noprofile", "--norc", "-eo", "pipefail"]
EXPRESSION: Final = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


class Api:
    """Comments of one pull request, as GitHub's API gives and takes them."""

    def __init__(self) -> None:
        self.comments: list[dict[str, Any]] = []
        self.refuses = False
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_user = self.path == "/user"  # which the token of a workflow may not ask
                page = api.comments if self.path.endswith("page=1") else []
                self._answer(403 if is_user else 200, page)

            def do_POST(self) -> None:
                self._write({"id": len(api.comments) + 1, "user": {"login": "github-actions[bot]"}})

            def do_PATCH(self) -> None:
                number = urlsplit(self.path).path.rpartition("/")[2]
                self._write(next(each for each in api.comments if str(each["id"]) == number))

            def _write(self, comment: dict[str, Any]) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.headers["Authorization"] == "Bearer secret"
                if api.refuses:
                    self._answer(403, {})
                    return
                comment["body"] = content["body"]
                if comment not in api.comments:
                    api.comments.append(comment)
                self._answer(200, comment)

            def _answer(self, status: int, content: object) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def variables(self) -> dict[str, str]:
        address = f"http://127.0.0.1:{self.server.server_port}"
        return {"GITHUB_REPOSITORY": "someone/something", "GITHUB_API_URL": address, "NO_PROXY": "127.0.0.1"}

    @property
    def bodies(self) -> list[str]:
        return [each["body"] for each in self.comments]


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api()
    yield api
    api.server.shutdown()
    api.server.server_close()


@dataclass
class Outcome:
    """What a use of the action came to."""

    code: int = 0
    said: str = ""
    summary: str = ""
    outputs: dict[str, dict[str, str]] = field(default_factory=dict)


def used(
    api: Api, folder: Path, workspace: Path, program: str = "-m stepscope", last: str | None = None, **inputs: str
) -> Outcome:
    """Run the steps of the action, up to the last, as GitHub does.

    Args:
        program: what Python runs in place of stepscope.
        inputs: those of the action, with _ in place of -.
    """
    given = {name: str(each.get("default", "")) for name, each in ACTION["inputs"].items()} | {"base": ""}
    given |= {name.replace("_", "-"): value for name, value in inputs.items()}
    assert given.keys() == ACTION["inputs"].keys()
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name, words in (("stepscope", f"{sys.executable} {program}"), ("python", sys.executable)):
        (programs / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (programs / name).chmod(0o755)
    outcome = Outcome()
    summary = folder / "summary"
    summary.touch()
    for number, step in enumerate(ACTION["runs"]["steps"]):
        known = {f"inputs.{name}": value for name, value in given.items()}
        known |= {
            f"steps.{name}.outputs.{key}": value for name, all in outcome.outputs.items() for key, value in all.items()
        }
        known |= {"github.event.pull_request.number": "7"}
        if not value_of(step.get("if", "'yes'"), known):
            continue
        output = folder / f"output-{number}"
        output.touch()
        variables = {name: resolved(text, known) for name, text in step.get("env", {}).items()}
        ran = subprocess.run(
            [*SHELL, "-c", step["run"]],
            cwd=workspace,
            env=environment(
                **{**variables, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "RUNNER_TEMP": str(folder)},
                GITHUB_OUTPUT=str(output),
                GITHUB_STEP_SUMMARY=str(summary),
                GITHUB_ACTION_PATH=str(REPOSITORY),
                **api.variables,
            ),
            capture_output=True,
            text=True,
            timeout=120,
        )
        outcome.said += ran.stdout + ran.stderr
        outcome.code = ran.returncode
        outcome.outputs[step.get("id", "")] = dict(line.split("=", 1) for line in output.read_text().splitlines())
        if ran.returncode or (last is not None and step.get("id") == last):
            break
    outcome.summary = summary.read_text()
    return outcome


def resolved(text: str, known: Mapping[str, str]) -> str:
    return EXPRESSION.sub(lambda found: value_of(found[1], known), text)


def value_of(expression: str, known: Mapping[str, str]) -> str:
    """The value of an expression; true is any text, false none."""
    for sign in ("||", "&&"):
        left, found, right = expression.partition(sign)
        if found:
            value = value_of(left.strip(), known)
            return value if bool(value) == (sign == "||") else value_of(right.strip(), known)
    left, found, right = expression.partition("!=")
    if found:
        return "yes" if value_of(left.strip(), known) != value_of(right.strip(), known) else ""
    return expression[1:-1] if expression.startswith("'") else known.get(expression, "")


def test_no_script_contains_an_expression() -> None:
    assert [step["name"] for step in ACTION["runs"]["steps"] if "${{" in step["run"]] == []


def test_a_regression_fails_and_there_is_one_comment(api: Api, tmp_path: Path) -> None:
    alien = {"id": 1, "user": {"login": "someone"}, "body": "<!-- stepscope: step time -->"}
    gone = {"id": 0, "user": None, "body": None}
    api.comments += [dict(alien), dict(gone)]
    traces = {"traces": str(PER_TOKEN), "baseline": str(BATCHED)}
    slower = used(api, tmp_path / "slower", tmp_path, **traces, fail_if_slower="5%", token="secret")
    assert (slower.code, slower.outputs["report"]["failed"]) == (1, "true"), slower.said
    assert "Slower" in slower.summary
    assert str(PER_TOKEN.parent) not in slower.summary
    assert api.comments[0] == alien
    assert api.bodies[2:] == [f"<!-- stepscope: step time -->\n{slower.summary}"]

    good = used(api, tmp_path / "good", tmp_path, traces=str(BATCHED), fail_on="99%", token="secret")
    assert (good.code, good.outputs["report"]["failed"]) == (0, "false"), good.said
    assert api.comments[0] == alien
    assert api.bodies[2:] == [f"<!-- stepscope: step time -->\n{good.summary}"]


def test_a_comment_that_is_refused_fails_nothing(api: Api, tmp_path: Path) -> None:
    api.refuses = True  # as of a fork's pull request
    report = tmp_path / "report.md"
    report.write_text("<details>\n" + "long\n" * 20_000)
    told = {"TOKEN": "secret", "PULL_REQUEST": "7", "REPORT": str(report), "NAME": "a-->b"}
    said = run_comment(api, **told)
    assert "No comment was written" in said
    assert "secret" not in said
    api.refuses = False
    run_comment(api, **told)
    [body] = api.bodies
    assert body.startswith("<!-- stepscope: ab -->\n<details>")
    assert body.endswith("</details>")
    assert len(body) < 65_536


def run_comment(api: Api, **variables: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-S", REPOSITORY / "scripts" / "comment_on_pull_request.py"],
        env={**os.environ, **api.variables, **variables},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_mistake_is_no_regression(api: Api, tmp_path: Path) -> None:
    hostile = f"$(touch {tmp_path}/hostile)`touch {tmp_path}/hostile`; touch {tmp_path}/hostile"
    wrong = used(api, tmp_path / "run", tmp_path, traces=hostile, token="secret")
    assert wrong.code == 2
    rounds = used(api, tmp_path / "rounds", tmp_path, command="train.py", rounds=f"a[$(touch {tmp_path}/hostile)]")
    open_quote = used(api, tmp_path / "quote", tmp_path, command="train.py --name it's")
    assert (rounds.code, open_quote.code > 0) == (2, True)
    assert (api.comments, (tmp_path / "hostile").exists()) == ([], False)


RECORDER: Final = """\
import json, os, sys
import part
with open(os.environ["RUNNER_TEMP"] + "/recorded", "a") as file:
    print(json.dumps([part.SIDE, os.getcwd(), sys.argv[1:]]), file=file)
"""


def test_a_command_is_recorded_in_turn_at_the_base_and_here(api: Api, tmp_path: Path) -> None:
    """What `stepscope run` is called with; a program in its place imports a module of its side."""
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "examples").mkdir()
    (project / "examples" / "train.py").touch()
    part = project / "src" / "part.py"
    part.write_text("SIDE = 'base'\n")
    git = ["git", "-C", str(project), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"]):
        subprocess.run([*git, *words], check=True)
    base = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    part.write_text("SIDE = 'the head'\n")
    (project / base).mkdir()  # with which a head could stand for its own base
    recorder = tmp_path / "recorder.py"
    recorder.write_text(RECORDER)

    command = {"command": "train.py --name 'two words; $HOME'", "steps": "3", "rounds": "2"}
    place = {"base": base, "working_directory": "examples"}
    found = used(api, tmp_path / "run", project, program=str(recorder), last="record", **command, **place)
    assert found.code == 0, found.said
    calls = [json.loads(line) for line in (tmp_path / "run" / "recorded").read_text().splitlines()]
    assert [side for side, _, _ in calls] == ["base", "the head", "base", "the head"]
    assert {Path(folder).name for _, folder, _ in calls} == {"examples"}
    assert calls[1][1] == str(project / "examples")
    runs = []
    for _, _, (name, *words) in calls:
        arguments = RUN.parsed(words[:-4])
        assert (name, arguments.steps) == ("run", 3)
        assert words[-4:] == ["--", "train.py", "--name", "two words; $HOME"]
        runs.append(f"{arguments.folder}/{arguments.name}")
    assert found.outputs["record"] == {"bases": ",".join(runs[::2]), "heads": ",".join(runs[1::2])}
