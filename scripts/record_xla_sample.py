#!/usr/bin/env python3
"""Record tests/fixtures/jax_training_cpu.xplane.pb.gz: XLA's profile of examples/jax_training.py, made fit to share.

    python scripts/record_xla_sample.py

Needs jax on a CPU, and stepscope; four steps are recorded, the third of which compiles.
"""

import gzip
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp

from stepscope.readers.xplane.content import varint
from stepscope.trace.protobuf_fields import text

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLE = "examples/jax_training.py"
TARGET = REPOSITORY / "tests" / "fixtures" / "jax_training_cpu.xplane.pb.gz"
LIMIT_BYTES = 100_000
HOST = "host"
HOSTNAMES = 4
"""Field of a profile that names the machines it was recorded on."""
ABSOLUTE_PATH = re.compile(rb"(?<![\w.)/-])/(?:home|root|usr|opt|tmp|work|var|srv|mnt|data)/[\w./+-]+")


def main() -> None:
    jax.config.update("jax_hlo_source_file_canonicalization_regex", re.escape(f"{REPOSITORY}/"))
    example = loaded()
    with tempfile.TemporaryDirectory() as folder:
        record(example, Path(folder))
        (profile,) = Path(folder).rglob("*.xplane.pb")
        written = gzip.compress(shareable(profile.read_bytes()), compresslevel=9, mtime=0)
    if len(written) > LIMIT_BYTES:
        raise SystemExit(f"{TARGET.name} would take {len(written)} bytes, more than {LIMIT_BYTES}")
    TARGET.write_bytes(written)
    print(f"{TARGET.relative_to(REPOSITORY)}: {len(written)} bytes")


def loaded() -> ModuleType:
    """The example as a module whose code says that it stands at its path in the repository."""
    module = ModuleType("jax_training")
    sys.modules["jax_training"] = module
    exec(compile((REPOSITORY / EXAMPLE).read_text(), EXAMPLE, "exec"), module.__dict__)
    return module


def record(example: ModuleType, folder: Path) -> None:
    """Four steps after one that is not recorded; the third has a batch of another length."""
    parameters = example.initial(0)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 2

    def step(number: int) -> None:
        nonlocal parameters
        with jax.profiler.TraceAnnotation("load_batch"):
            inputs, labels = example.batch(number, ragged=number == 3)
        parameters, loss = example.train_step(parameters, jnp.asarray(inputs), jnp.asarray(labels))
        float(loss)

    step(0)
    jax.profiler.start_trace(str(folder), profiler_options=options)
    for number in range(1, 5):
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            step(number)
    jax.profiler.stop_trace()


def shareable(profile: bytes) -> bytes:
    """The profile under another host name; raises SystemExit if it names a path of this machine."""
    parts = [text(HOSTNAMES, HOST) if number == HOSTNAMES else raw for number, raw in fields(profile)]
    found = b"".join(parts)
    left = sorted(set(ABSOLUTE_PATH.findall(found)))
    if left:
        raise SystemExit(f"the profile still names {len(left)} paths of this machine, such as {left[0].decode()!r}")
    return found


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and bytes, tag included, of each field of a message whose fields all have a length."""
    at = 0
    while at < len(message):
        tag, behind = varint(message, at)
        length, behind = varint(message, behind)
        yield tag >> 3, message[at : behind + length]
        at = behind + length


if __name__ == "__main__":
    main()
