"""`stepscope serving`: how long a language model would take to answer on a device, from its shapes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from stepscope.commands.plan.predict import devices_named, link_of
from stepscope.commands.shared import output
from stepscope.commands.shared.options import (
    NANOSECONDS,
    Command,
    CommandParser,
    add_redact_option,
    add_report_options,
    number,
    whole,
)

_TYPES: Final = ("bf16", "fp16", "fp8")
"""Those of `stepscope.predict.model_shape`, which the help of all commands does not wait for."""

_UNITS: Final = {unit: factor for unit, factor in NANOSECONDS.items() if unit}  # 2 could be meant as anything


def _prepare_parser(parser: CommandParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=Path, help="the model's config.json, or its folder")
    parser.add_argument(
        "--to", metavar="DEVICES", help="devices separated by commas, or all; stepscope devices lists them"
    )
    asked = parser.add_argument_group("what is served")
    asked.add_argument(
        "--batch", metavar="N", type=whole(1, 99_999, "number of requests"), default=1, help="requests at once (1)"
    )
    tokens = whole(1, 9_999_999, "number of tokens")
    asked.add_argument("--prompt", metavar="TOKENS", type=tokens, default=1024, help="tokens of each prompt (1024)")
    asked.add_argument("--output", metavar="TOKENS", type=tokens, default=256, help="tokens of each answer (256)")
    how = parser.add_argument_group("how it is served")
    how.add_argument(
        "--tensor-parallel",
        metavar="N",
        type=whole(1, 1024, "number of devices"),
        default=1,
        dest="devices",
        help="devices that share every layer (1)",
    )
    how.add_argument("--link", metavar="LINK", help="their link: nvlink4, pcie4, 12GB/s+5us (default: their own)")
    how.add_argument(
        "--host",
        metavar="TIME",
        type=number("is not a time of at most 10 s: write 1.5ms or 800us", _UNITS, most=10e9),
        help="that each pass waits for the host, such as 1.5ms (default: none, and up to 2.4ms in the range)",
    )
    how.add_argument("--weights", choices=_TYPES, help="number type of the weights (default: the model's)")
    how.add_argument("--cache", choices=_TYPES, help="number type of the cache of keys and values (default: 16 bits)")
    add_report_options(parser, json="for programs; - for standard output")
    add_redact_option(parser)


def _run(arguments: argparse.Namespace) -> int:
    from stepscope.errors import UsageError
    from stepscope.predict.limits import check_link
    from stepscope.predict.model_shape import read_model
    from stepscope.predict.serving import ServingRequest, serving_prediction
    from stepscope.report.serving import serving_document, serving_json

    link = link_of(arguments)
    if link is not None and arguments.devices == 1:
        raise UsageError("--link needs several devices, such as --tensor-parallel 2")
    model = read_model(arguments.model)
    names = ("batch", "prompt", "output", "devices", "weights", "cache")
    request = ServingRequest(**{name: getattr(arguments, name) for name in names}, host_ns=arguments.host)
    targets = devices_named(arguments.to)
    if link is not None:
        for each in targets:
            check_link(link, each)
    found = tuple(serving_prediction(model, request, each, link) for each in targets)
    path = arguments.model.name if arguments.redact else str(arguments.model)
    output.write_reports(
        arguments,
        lambda: serving_document(path, model, request, found),
        json=lambda: serving_json(path, model, request, found),
    )
    return 0


SERVING: Final = Command(
    "serving",
    "How long a language model would take to its first token and for each further one, on any device.",
    _prepare_parser,
    _run,
    """\
examples:
  stepscope serving config.json --to H100-SXM,MI300X
  stepscope serving config.json --to H100-SXM --batch 32 --prompt 2048 --output 512
  stepscope serving llama-70b/ --to H100-SXM --tensor-parallel 4 --weights fp8
  stepscope serving llama-70b/ --to L40S --tensor-parallel 4 --link pcie4 --json -

MODEL is the file that Hugging Face's transformers keep beside a model's weights; nothing is downloaded. A recorded
server's prefill and decoding on other devices: stepscope predict TRACE. docs/serving.md explains the method, and when
not to believe it.""",
)
