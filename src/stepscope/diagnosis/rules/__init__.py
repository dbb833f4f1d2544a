"""One module a rule; RULES names them all, in the order in which they are asked."""

from __future__ import annotations

from types import ModuleType
from typing import Final

from stepscope.diagnosis.rules import (
    allocator_retries,
    exposed_communication,
    exposed_copy,
    frequent_logging,
    fusible_chain,
    gradient_clipping,
    host_synchronisation,
    inefficient_kernel,
    input_bound,
    kernel_variance,
    large_logits,
    launch_bound,
    layout_conversion,
    loader_contention,
    loader_restart,
    loop_in_step,
    low_occupancy,
    low_precision,
    memory_fragmentation,
    memory_growth,
    memory_headroom,
    memory_near_limit,
    padding_waste,
    python_in_step,
    recompilation,
    repeated_casts,
    single_tensor_optimizer,
    slow_input_function,
    step_variance,
    trace_health,
    unfused_attention,
    zero_grad,
)

RULES: Final[tuple[ModuleType, ...]] = (
    input_bound,
    slow_input_function,
    loader_restart,
    loader_contention,
    frequent_logging,
    host_synchronisation,
    launch_bound,
    python_in_step,
    loop_in_step,
    fusible_chain,
    gradient_clipping,
    zero_grad,
    exposed_copy,
    exposed_communication,
    recompilation,
    single_tensor_optimizer,
    low_precision,
    inefficient_kernel,
    low_occupancy,
    kernel_variance,
    step_variance,
    memory_near_limit,
    memory_growth,
    memory_fragmentation,
    allocator_retries,
    memory_headroom,
    large_logits,
    layout_conversion,
    padding_waste,
    repeated_casts,
    unfused_attention,
    trace_health,
)
"""Each module has ID, TITLE, THRESHOLDS, a docstring with the sections of its page, and `check(view) -> RuleResult`.

One that tells a cause more precisely than others names their IDs in REPLACES.
"""
