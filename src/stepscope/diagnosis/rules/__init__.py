"""Every rule, in the order in which they run. Written by scripts/generate_docs; a new rule goes to the end."""
# ruff: noqa: I001
# fmt: off

from __future__ import annotations

from typing import Final

from stepscope.diagnosis.rule import Rule
from stepscope.diagnosis.rules import (
    allocator_retries, between_iterations, buffer_broadcast, checkpoint_in_step, costly_line, cpu_fallback,
    data_parallel, debug_mode, decode_graphs, device_ping_pong, device_tail, exposed_communication, exposed_copy,
    frequent_evaluation, frequent_logging, fusible_chain, garbage_collection, gradient_clipping, gradient_copies,
    graph_break, growing_work, host_allocator, host_contention, host_created_tensor, host_metrics, host_synchronisation,
    inefficient_kernel, input_bound, kernel_variance, large_logits, late_first_launch, late_rank, launch_bound,
    layout_conversion, loader_contention, loader_restart, loop_in_step, low_occupancy, low_precision, made_in_step,
    memory_fragmentation, memory_growth, memory_headroom, memory_near_limit, numa_misplacement, one_request,
    padding_waste, pipeline_bubbles, prefill_stall, python_in_step, recompilation, rejected_drafts, repeated_casts,
    repeated_prefix, single_tensor_optimizer, slow_input_function, slow_start, slow_transfer, small_batch,
    small_buckets, step_variance, thread_oversubscription, trace_health, training_mode, unaligned_dimensions,
    unfused_attention, unused_parameters, waiting_for_results, wrong_backend, zero_grad,
)

RULES: Final[tuple[Rule, ...]] = (
    input_bound.RULE, slow_input_function.RULE, loader_restart.RULE, loader_contention.RULE, frequent_logging.RULE,
    host_synchronisation.RULE, waiting_for_results.RULE, late_first_launch.RULE, launch_bound.RULE, small_batch.RULE,
    python_in_step.RULE, loop_in_step.RULE, fusible_chain.RULE, gradient_clipping.RULE, zero_grad.RULE,
    host_created_tensor.RULE, device_ping_pong.RULE, cpu_fallback.RULE, device_tail.RULE, exposed_copy.RULE,
    exposed_communication.RULE, recompilation.RULE, single_tensor_optimizer.RULE, low_precision.RULE,
    inefficient_kernel.RULE, low_occupancy.RULE, kernel_variance.RULE, garbage_collection.RULE, checkpoint_in_step.RULE,
    debug_mode.RULE, thread_oversubscription.RULE, host_contention.RULE, host_allocator.RULE, step_variance.RULE,
    memory_near_limit.RULE, memory_growth.RULE, memory_fragmentation.RULE, allocator_retries.RULE, memory_headroom.RULE,
    large_logits.RULE, layout_conversion.RULE, padding_waste.RULE, repeated_casts.RULE, unfused_attention.RULE,
    numa_misplacement.RULE, slow_start.RULE, small_buckets.RULE, gradient_copies.RULE, unused_parameters.RULE,
    wrong_backend.RULE, data_parallel.RULE, unaligned_dimensions.RULE, late_rank.RULE, slow_transfer.RULE,
    trace_health.RULE, costly_line.RULE, buffer_broadcast.RULE, frequent_evaluation.RULE, made_in_step.RULE,
    growing_work.RULE, host_metrics.RULE, between_iterations.RULE, decode_graphs.RULE, one_request.RULE,
    prefill_stall.RULE, graph_break.RULE, repeated_prefix.RULE, training_mode.RULE, rejected_drafts.RULE,
    pipeline_bubbles.RULE,
)
