"""Train a small classifier with JAX, recorded from its beginning, or from a second terminal while it runs.

    stepscope run examples/jax_training.py
    stepscope run examples/jax_training.py --ragged

    python examples/jax_training.py --seconds 60 --port 9012
    stepscope attach localhost:9012 --seconds 2

The naive loop makes each batch in the training process and reads the loss from the device in every step. With
`--ragged` most batches have a length of their own, for which XLA compiles the step anew. Needs jax; `attach` also
pip install 'stepscope[xla]'.
"""

import argparse
import itertools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

FEATURES = 256
WIDTH = 512
CLASSES = 10
BATCH = 128

Parameters = list[tuple[jax.Array, jax.Array]]


def initial(seed: int) -> Parameters:
    """Weights and biases of three layers."""
    generator = np.random.default_rng(seed)
    sizes = [FEATURES, WIDTH, WIDTH, CLASSES]
    return [
        (jnp.asarray(generator.normal(0, rows**-0.5, (rows, columns)), jnp.float32), jnp.zeros(columns))
        for rows, columns in itertools.pairwise(sizes)
    ]


def loss_of(parameters: Parameters, inputs: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross entropy."""
    values = inputs
    for weight, bias in parameters[:-1]:
        values = jax.nn.relu(values @ weight + bias)
    weight, bias = parameters[-1]
    scores = jax.nn.log_softmax(values @ weight + bias)
    return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], axis=1))


@jax.jit
def train_step(parameters: Parameters, inputs: jax.Array, labels: jax.Array) -> tuple[Parameters, jax.Array]:
    """The parameters after one step of gradient descent, and the loss before it."""
    loss, gradients = jax.value_and_grad(loss_of)(parameters, inputs, labels)
    return jax.tree.map(lambda value, gradient: value - 0.1 * gradient, parameters, gradients), loss


def batch(step: int, *, ragged: bool) -> tuple[np.ndarray, np.ndarray]:
    """Made-up examples; ragged ones are fewer each time, up to 64 times."""
    generator = np.random.default_rng(step)
    count = BATCH - step % 64 if ragged else BATCH
    labels = generator.integers(0, CLASSES, count)
    return generator.normal(size=(count, FEATURES)).astype(np.float32) + labels[:, None] / CLASSES, labels


def main(arguments: Sequence[str] | None = None) -> None:
    """Train for some steps, or for some seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, help="train for so long instead")
    parser.add_argument("--port", type=int, help="start JAX's profiler server there, for stepscope attach")
    parser.add_argument("--ragged", action="store_true", help="batches of different lengths")
    chosen = parser.parse_args(arguments)
    if chosen.port is not None:
        jax.profiler.start_server(chosen.port)
    parameters = initial(0)
    begun = time.monotonic()
    step, loss = 0, float("nan")
    while step < chosen.steps if chosen.seconds is None else time.monotonic() - begun < chosen.seconds:
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            parameters, value = train_step(parameters, *batch(step, ragged=chosen.ragged))
            loss = float(value)
        step += 1
        if step == 1 and chosen.port is not None:
            print(f"the profiler server listens on port {chosen.port}", flush=True)
    milliseconds = (time.monotonic() - begun) / step * 1000
    print(f"{step} steps of {milliseconds:.1f} ms, loss {loss:.4f}")


if __name__ == "__main__":
    main()
