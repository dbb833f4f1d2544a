"""Names of files that JAX and the libraries around it have: its Python tracer writes names without folders."""

from __future__ import annotations

from typing import Final

# fmt: off
LIBRARY_FILES: Final = frozenset({
    "_dtype.py", "_methods.py", "abstract_arrays.py", "ad.py", "ad_checkpoint.py", "ad_util.py", "alias.py",
    "ann.py", "api.py", "api_util.py", "array.py", "array_api_metadata.py", "array_constructors.py",
    "array_creation.py", "array_methods.py", "arrayprint.py", "attention.py", "base.py", "basearray.py",
    "batching.py", "blocked_sampler.py", "buffer_callback.py", "cache_key.py", "callback.py", "checkify.py",
    "cloud_tpu_init.py", "combine.py", "compilation_cache.py", "compilation_cache_interface.py", "compiler.py",
    "compute_on.py", "config.py", "convolution.py", "core.py", "cost_estimate.py", "custom_api_util.py",
    "custom_batching.py", "custom_derivatives.py", "custom_partitioning.py",
    "custom_partitioning_sharding_rule.py", "debugging.py", "deprecations.py", "discharge.py", "dispatch.py",
    "distributed.py", "dlpack.py", "dtypes.py", "earray.py", "effects.py", "einshape.py", "einsum.py",
    "environment_info.py", "error.py", "error_check.py", "errors.py", "eval_jaxpr.py", "ffi.py", "fft.py",
    "flatten_util.py", "fromnumeric.py", "frozen_dict.py", "functions.py", "hardware_utils.py",
    "hashable_array.py", "helpers.py", "hijax.py", "hlo_interpreter.py", "index_tricks.py", "indexing.py",
    "initializers.py", "integrate.py", "jaxpr_util.py", "lax.py", "lax_numpy.py", "lax_reference.py",
    "layout.py", "lazy_loader.py", "lift.py", "linalg.py", "linear.py", "linear_util.py", "literals.py",
    "logging_config.py", "lru_cache.py", "mesh.py", "mesh_utils.py", "mlir.py", "module.py", "monitoring.py",
    "mosaic_gpu.py", "mpmd.py", "multiarray.py", "named_sharding.py", "ndimage.py", "normalization.py",
    "numeric.py", "numerics.py", "op_shardings.py", "other.py", "pallas_call.py", "parallel.py",
    "parallel_loader.py", "partial_eval.py", "partition.py", "partition_spec.py", "path.py", "philox2x32.py",
    "philox4x32.py", "pickle_util.py", "pjit.py", "pmap.py", "polynomial.py", "pretty_printer.py",
    "primitives.py", "prng.py", "profiler.py", "public_test_util.py", "pxla.py", "rbg.py", "reductions.py",
    "ref.py", "remat.py", "scalar_types.py", "scaled_dot.py", "scope.py", "setops.py", "shape_base.py",
    "shard_alike.py", "shard_map.py", "sharding.py", "sharding_impls.py", "signal.py", "slicing.py",
    "sorting.py", "source_info_util.py", "sourcemap.py", "special.py", "stages.py", "stateful_rng.py",
    "stochastic.py", "struct.py", "tensor_contractions.py", "test_loader.py", "test_multiprocess.py",
    "test_util.py", "test_warning_util.py", "threefry2x32.py", "threefry4x32.py", "tpu_custom_call.py",
    "traceback_util.py", "train_state.py", "transform.py", "tree.py", "tree_util.py", "triton.py", "types.py",
    "typing.py", "ufunc_api.py", "ufuncs.py", "update.py", "util.py", "utils.py", "vectorize.py",
    "window_functions.py", "windowed_reductions.py", "xla_bridge.py", "xla_builder.py", "xla_metadata.py",
    "xla_metadata_lib.py", "xla_model.py", "xla_transform.py",
})
# fmt: on
"""Of JAX's own sources, Flax, Optax, NumPy and torch_xla."""
