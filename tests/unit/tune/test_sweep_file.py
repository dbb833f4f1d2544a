"""Sweep files: W&B's as they are, the short form, the commands they give, and what is said of mistakes."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from pathlib import Path
from typing import Any

import msgspec
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from stepscope.errors import UsageError
from stepscope.tune.sweep.file import MACROS, EarlyEnd, Metric, Sweep, nested, parse_sweep, read_sweep
from stepscope.tune.sweep.parameters import DISTRIBUTIONS, Parameter, quantised

REPOSITORY = Path(__file__).resolve().parents[3]
SHARE = FloatDistribution(1e-9, 1 - 1e-9)
OWN = """
command: OMP_NUM_THREADS={threads} python train.py --lr {lr} --width={width} 'a b'
metric: val_loss
parameters:
  lr: {min: 1e-5, max: 1e-1, log: true}
  width: [64, 128]
  threads: {min: 1, max: 4}
"""
WANDB = """
program: train.py
name: my sweep
project: vision
entity: team
method: bayes
metric: {name: accuracy, goal: maximize, target: 0.99}
run_cap: 12
early_terminate: {type: hyperband, max_iter: 27, s: 2, eta: 3, strict: true}
parameters:
  lr: {distribution: log_uniform_values, min: 1e-4, max: 0.1}
  optimizer:
    parameters:
      kind: {values: [adam, sgd]}
      momentum: {value: 0.9}
  nesterov: {values: [true, false]}
command: ["${env}", "${interpreter}", "${program}", "--out=${envvar:OUT_PLACE}", "${args_no_boolean_flags}"]
"""


def read(text: str, folder: Path, **changes: Any) -> Sweep:
    file = folder / "sweep.yaml"
    file.write_text(text)
    return read_sweep(file, changes)


def parameter(given: object, name: str = "p") -> Parameter:
    [found] = (each for each in sweep_of({name: given, "x": [1, 2]}).parameters if each.name.startswith(name))
    return found


def sweep_of(parameters: object, **more: Any) -> Sweep:
    content = {"program": "train.py", "metric": "loss", "parameters": parameters, **more}
    return parse_sweep(content, default_name="sweep")


def test_the_short_form(tmp_path: Path) -> None:
    sweep = read(OWN, tmp_path)

    assert (sweep.name, sweep.method, sweep.trials, sweep.metric) == ("sweep", "tpe", 30, Metric("val_loss"))
    assert [each.optuna_distribution() for each in sweep.parameters] == [
        FloatDistribution(1e-5, 0.1, log=True),
        CategoricalDistribution([64, 128]),
        IntDistribution(1, 4),
    ]
    words, variables = sweep.command.filled({"lr": 1e-5, "width": 64, "threads": 2}, tmp_path)
    assert words == ["python", "train.py", "--lr", "1e-05", "--width=64", "a b"]
    assert variables == {"OMP_NUM_THREADS": "2"}
    assert sweep.warnings == ()
    assert msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(sweep))), Sweep) == sweep


def test_a_file_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT_PLACE", "there")
    sweep = read(WANDB, tmp_path)

    assert (sweep.name, sweep.method, sweep.trials) == ("my-sweep", "tpe", 12)
    assert sweep.metric == Metric("accuracy", "maximize", 0.99)
    assert sweep.early == EarlyEnd(max_iter=27, s=2, eta=3, strict=True)
    assert [each.name for each in sweep.parameters] == ["lr", "optimizer.kind", "optimizer.momentum", "nesterov"]
    assert [each.name for each in sweep.searched] == ["lr", "optimizer.kind", "nesterov"]
    values = {"lr": 0.5, "optimizer.kind": "sgd", "optimizer.momentum": 0.9, "nesterov": False}
    words, _ = sweep.command.filled(values, tmp_path)
    assert words[0] == "/usr/bin/env"
    assert words[2:] == ["train.py", "--out=there", "--lr=0.5", "--optimizer.kind=sgd", "--optimizer.momentum=0.9"]
    assert sweep.command.filled({**values, "nesterov": True}, tmp_path)[0][-1] == "--nesterov"
    assert nested(values)["optimizer"] == {"kind": "sgd", "momentum": 0.9}
    assert sweep.warnings == (
        "entity and project have no meaning here: nothing is sent to W&B",
        "method bayes: W&B models the metric by Gaussian processes; here it is TPE, as method: tpe",
    )
    assert msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(sweep))), Sweep) == sweep


@pytest.mark.parametrize(
    ("macro", "expected"),
    [
        ("${args}", ["--a=1", "--b.c=True"]),
        ("${args_no_hyphens}", ["a=1", "b.c=True"]),
        ("${args_no_boolean_flags}", ["--a=1", "--b.c"]),
        ("${args_no_equals}", ["--a", "1", "--b.c", "True"]),
        ("${args_append_hydra}", ["+a=1", "+b.c=True"]),
        ("${args_override_hydra}", ["++a=1", "++b.c=True"]),
        ("${args_json}", ['{"a": 1, "b": {"c": true}}']),
        ("${args_json_file}", ["values.json"]),
    ],
)
def test_macros(macro: str, expected: list[str]) -> None:
    parameters = {"a": [1, 2], "b": {"parameters": {"c": [True, False]}}}
    command = sweep_of(parameters, command=["${program}", macro]).command

    assert command.filled({"a": 1, "b.c": True}, Path("values.json"))[0] == ["train.py", *expected]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([1, 2.5, "a", None], CategoricalDistribution([1, 2.5, "a", None])),
        ({"values": [1, True]}, CategoricalDistribution(["1", "true"])),
        ({"values": [[1, 2], {"a": 1}]}, CategoricalDistribution(["[1, 2]", '{"a": 1}'])),
        ({"min": 1, "max": 8}, IntDistribution(1, 8)),
        ({"min": 1, "max": 8.0}, FloatDistribution(1.0, 8.0)),
        ({"min": 16, "max": 512, "log": True}, IntDistribution(16, 512, log=True)),
        ({"min": 0, "max": 1.0, "step": 0.25}, FloatDistribution(0, 1, step=0.25)),
        ({"min": 0, "max": 10, "step": 5}, IntDistribution(0, 10, step=5)),
        ({"distribution": "uniform", "min": 1, "max": 2}, FloatDistribution(1.0, 2.0)),
        ({"distribution": "q_uniform", "min": 1, "max": 9, "q": 2}, FloatDistribution(1.0, 9.0)),
        ({"distribution": "log_uniform", "min": -9, "max": 0}, FloatDistribution(math.exp(-9), 1.0, log=True)),
        ({"distribution": "q_log_uniform", "min": 0, "max": 2}, FloatDistribution(1.0, math.exp(2), log=True)),
        ({"distribution": "inv_log_uniform", "min": 0, "max": 3}, FloatDistribution(math.exp(-3), 1.0, log=True)),
        ({"distribution": "log_uniform_values", "min": 0.1, "max": 3}, FloatDistribution(0.1, 3.0, log=True)),
        ({"distribution": "inv_log_uniform_values", "min": 0.1, "max": 3}, FloatDistribution(0.1, 3.0, log=True)),
        ({"distribution": "q_log_uniform_values", "min": 1, "max": 9}, FloatDistribution(1.0, 9.0, log=True)),
        *(({"distribution": name}, SHARE) for name in ("normal", "q_normal", "log_normal", "q_log_normal", "beta")),
        ({"values": ["a", "b"], "probabilities": [0.3, 0.7]}, SHARE),
    ],
)
def test_what_optuna_draws(given: object, expected: BaseDistribution) -> None:
    assert parameter(given).optuna_distribution() == expected


@pytest.mark.parametrize(
    ("given", "drawn", "value"),
    [
        ({"values": [1, True]}, "true", True),
        ({"values": [[1, 2], {"a": 1}]}, '{"a": 1}', {"a": 1}),
        ({"distribution": "q_uniform", "min": 1, "max": 9, "q": 2}, 4.9, 4),
        ({"distribution": "q_uniform", "min": 0, "max": 1, "q": 0.1}, 0.31, 0.3),
        ({"distribution": "q_log_uniform_values", "min": 1, "max": 90, "q": 8}, 60.0, 64),
        ({"values": ["a", "b", "c"], "probabilities": [0.3, 0.7, 0.0]}, 0.29, "a"),
        ({"values": ["a", "b", "c"], "probabilities": [0.3, 0.7, 0.0]}, 1 - 1e-9, "b"),
        ({"distribution": "normal", "mu": 2, "sigma": 3}, 0.5, 2.0),
        ({"distribution": "log_normal", "mu": 1}, 0.5, math.e),
        ({"distribution": "q_normal", "mu": 2.2, "sigma": 0}, 0.9, 2),
        ({"distribution": "beta", "a": 1, "b": 1}, 0.25, 0.25),
    ],
)
def test_the_value_of_what_is_drawn(given: object, drawn: object, value: object) -> None:
    found = parameter(given).value_of(drawn)

    assert found == pytest.approx(value) if isinstance(value, float) else found == value
    assert type(found) is type(value)


def test_shares_drawn_evenly_become_the_distribution() -> None:
    generator = random.Random(0)
    normal = parameter({"distribution": "normal", "mu": 5, "sigma": 2})
    weighted = parameter({"values": ["a", "b"], "probabilities": [0.2, 0.8]})
    drawn = [normal.value_of(generator.random()) for _ in range(20_000)]
    chosen = [weighted.value_of(generator.random()) for _ in range(20_000)]

    # Four standard errors: 2 / sqrt(20000) of the mean, 2 / sqrt(40000) of the deviation, 0.4 / sqrt(20000) of a share.
    assert statistics.mean(drawn) == pytest.approx(5, abs=0.057)
    assert statistics.stdev(drawn) == pytest.approx(2, abs=0.04)
    assert chosen.count("a") / 20_000 == pytest.approx(0.2, abs=0.0114)


def test_quantising_leaves_no_rounding_errors() -> None:
    assert [quantised(value, 0.1) for value in (0.26, 0.34, -0.26)] == [0.3, 0.3, -0.3]
    assert quantised(7.4, 5) == 5


@pytest.mark.parametrize(
    ("given", "grid"),
    [
        (["a", "b"], ["a", "b"]),
        ({"min": 1, "max": 3}, [1, 2, 3]),
        ({"min": 0, "max": 0.3, "step": 0.1}, [0.0, 0.1, 0.2, 0.3]),
        ({"distribution": "q_uniform", "min": 0.5, "max": 6, "q": 2}, [0.5, 2, 4, 6]),
    ],
)
def test_the_values_of_a_grid(given: object, grid: list[object]) -> None:
    assert parameter(given).grid() == grid


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({}, "parameters must name parameters, each with its values, such as lr: {min: 0.001, max: 0.1}"),
        ({"a b": [1]}, "parameters: 'a b' cannot name a parameter"),
        ({"lr": {"min": 1, "max": 0.5}}, "parameters.lr.max must be above min: it is 0.5, and min is 1"),
        ({"lr": {"min": 1}}, "parameters.lr.max is missing"),
        ({"lr": {"min": "a", "max": 2}}, "parameters.lr.min must be a number, not 'a'"),
        ({"lr": {"min": 1, "max": 10**400}}, "parameters.lr.max must be a finite number"),
        ({"lr": {"min": 0, "max": 2, "log": True}}, "parameters.lr.min must be above 0 where log is true, not 0"),
        ({"lr": {"mx": 1}}, "parameters.lr.mx is unknown; did you mean max?"),
        ({"lr": {"values": []}}, "parameters.lr.values must be a list of length >= 1, not []"),
        ({"lr": [1, 1]}, "parameters.lr.values has 1 twice"),
        ({"lr": 1}, "parameters: all of them are constants, so there is nothing to search"),
        (
            {"lr": {"distribution": "unifrm", "min": 0, "max": 1}},
            "parameters.lr.distribution: there is no 'unifrm'; did you mean uniform?",
        ),
        (
            {"lr": {"distribution": "int_uniform", "min": 0.5, "max": 2}},
            "parameters.lr.min must be a whole number for int_uniform, not 0.5",
        ),
        (
            {"lr": {"values": [1, 2], "probabilities": [0.5, 0.4]}},
            "parameters.lr.probabilities must be 0 or more and sum to 1, not to 0.9",
        ),
        ({"lr": {"distribution": "normal", "sigma": -1}}, "parameters.lr.sigma must be a whole number >= 0, not -1"),
        ({"o": {"parameters": {"lr": {"min": 1}}}}, "parameters.o.parameters.lr.max is missing"),
        (
            {"lr": {"distribution": "log_uniform", "min": 1, "max": 1e9}},
            "parameters.lr: min and max of log_uniform are",
        ),
    ],
)
def test_mistakes_in_parameters(parameters: object, sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        sweep_of(parameters)
    assert str(raised.value).startswith(sentence)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"metric": None}, "metric is missing"),
        ({"metric": {"name": "a", "goal": "max"}}, "metric.goal: there is no 'max'; there are minimize, maximize"),
        ({"metric": {"name": "a", "pattern": "("}}, "metric.pattern is not a regular expression"),
        ({"metric": {"name": "a", "pattern": "a"}}, "metric.pattern needs a group around the number"),
        (
            {"metric": {"name": "a", "from": "measure"}},
            "metric.name: stepscope itself measures step_ms and step_energy_j",
        ),
        ({"method": "annealing"}, "method: there is no 'annealing'"),
        ({"trials": 0}, "trials must be a whole number >= 1, not 0"),
        ({"trials": 10**7}, "trials must be a whole number <= 1000000, not 10000000"),
        ({"jobs": 1.5}, "jobs must be a whole number, not 1.5"),
        ({"steps": True}, "steps must be a whole number, not True"),
        ({"early_terminate": 3}, "early_terminate must be a mapping, not 3"),
        ({"early_terminate": {"min_iter": 1, "eta": 0.5}}, "early_terminate.eta must be a number > 1.0, not 0.5"),
        ({"early_terminate": {"min_iter": 1, "strict": 1}}, "early_terminate.strict must be true or false, not 1"),
        ({"metric": {"name": "a", "from": "paper"}}, "metric.from: there is no 'paper'; there are auto, log"),
        ({"metric": {"name": "a", "target": "b"}}, "metric.target must be a number, not 'b'"),
        ({"budget": "soon"}, "budget: 'soon' is not a time: write 90s, 20m or 2h"),
        ({"parametrs": 1}, "parametrs is not known; did you mean parameters?"),
        ({"metrics": []}, "metrics: only one metric can be searched for"),
        ({"early_terminate": {"type": "median"}}, "early_terminate.type: there is no 'median'; there is hyperband"),
        ({"early_terminate": {"max_iter": 9}}, "early_terminate needs min_iter, or max_iter with s"),
        ({"command": "train.py --lr {lrr}"}, "command: {lrr} is not a parameter; did you mean {lr}?"),
        ({"command": "train.py"}, "command: it leaves out lr; write {lr} where the value belongs"),
        ({"command": "train.py 'a"}, "command: no closing quotation"),
        ({"command": ["${progam}"]}, "command: ${progam} is not known; there are env, interpreter, program"),
        ({"command": ["x${args}"]}, "command: ${args} must be a word of its own"),
        ({"program": None}, "command is missing"),
        (
            {"metric": "step_ms", "early_terminate": {"min_iter": 1}},
            "early_terminate: step_ms is known only at the end",
        ),
    ],
)
def test_mistakes(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        sweep_of({"lr": [1, 2]}, **changes)
    assert str(raised.value).startswith(sentence)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty: a sweep file has at least"),
        ("- 1", "holds a list: a sweep file has keys"),
        ("a: [1", ", line 1 is not YAML: expected ',' or ']'"),
        ("a: !!python/object/apply:os.system [echo]", ", line 1 is not YAML: could not determine a constructor"),
        ("a: 1\na: 2", ", line 2: a appears twice"),
        ("[" * 5000, "is not a sweep's YAML"),
        ("x: &a [1, 1, 1]\n" + "".join(f"y{n}: &b{n} [*a, *a]\n" for n in range(3)), "x is not known"),
        ("x: \x00", "is not YAML"),
    ],
)
def test_files_that_are_none(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        read(text, tmp_path)
    assert sentence in str(raised.value)
    assert str(raised.value).startswith(str(tmp_path / "sweep.yaml"))


def test_a_file_that_unfolds_to_billions_of_values(tmp_path: Path) -> None:
    text = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    text += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))

    with pytest.raises(UsageError, match="more than 100,000 values"):
        read(text, tmp_path)


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is larger than 1 MiB"):
        read("#" * (1 << 21), tmp_path)


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    sweep = read(WANDB, tmp_path, trials=5, metric="loss", method="random", budget="2m", jobs=None)
    same = read(WANDB, tmp_path, metric="accuracy")

    assert (sweep.trials, sweep.metric, sweep.method, sweep.budget_s) == (5, Metric("loss"), "random", 120.0)
    assert same.metric == Metric("accuracy", "maximize", 0.99)


def test_a_measured_metric_on_the_command_line_needs_no_other_file(tmp_path: Path) -> None:
    sweep = read(WANDB, tmp_path, metric="step_ms")

    assert (sweep.metric, sweep.early) == (Metric("step_ms", source="measure"), None)
    assert sweep.warnings[-1].startswith("no trial ends early: step_ms")


def test_a_wandb_program_that_has_its_values_from_the_config_alone() -> None:
    sweep = sweep_of({"lr": [1, 2]}, command=["python", "train.py"])

    assert sweep.warnings == ("the command does not name lr: the program finds it only in wandb.config",)


def test_a_grid_needs_no_number_of_trials_and_other_searches_do() -> None:
    assert sweep_of({"lr": [1, 2]}, method="grid").trials is None
    assert sweep_of({"lr": [1, 2]}, budget=60).trials is None
    assert sweep_of({"lr": [1, 2]}).trials == 30


def test_the_guides_files_are_right_and_name_every_distribution_and_macro(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "sweep.md").read_text()

    for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL):
        assert read(text, tmp_path).warnings == ()
    assert read_sweep(REPOSITORY / "examples" / "sweep.yaml").trials == 24
    assert [name for name in DISTRIBUTIONS if f"`{name}`" not in page and name != "categorical_w_probabilities"] == []
    assert [name for name in MACROS if f"`${{{name}}}`" not in page] == []
