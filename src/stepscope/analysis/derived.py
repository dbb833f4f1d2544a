"""Tables computed from a trace that can be requested by name, in addition to its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import polars as pl

from stepscope.analysis.attribution import ATTRIBUTION_SCHEMA, operator_places, work_places
from stepscope.analysis.device_time import DEVICE_TIME_SCHEMA, QUEUE_TIME_SCHEMA, device_time, queue_time
from stepscope.analysis.host import HOST_SCHEMA, host_time
from stepscope.analysis.idle import IDLE_SCHEMA, idle_time
from stepscope.analysis.kernels import LAUNCH_SCHEMA, launch_table
from stepscope.analysis.operators import COST_SCHEMA, operator_costs
from stepscope.analysis.roofline import TABLE_SCHEMA, TENSOR_CORE_TABLE, roofline_table, tensor_core_table
from stepscope.analysis.steps import STEP_SCHEMA, step_table
from stepscope.trace import Trace

Schema = Mapping[str, type[pl.DataType]]

DERIVED: Final[dict[str, tuple[Callable[[Trace], pl.DataFrame], Schema]]] = {
    "steps": (step_table, STEP_SCHEMA),
    "idle": (idle_time, IDLE_SCHEMA),
    "host_time": (host_time, HOST_SCHEMA),
    "device_time": (device_time, DEVICE_TIME_SCHEMA),
    "queue_time": (queue_time, QUEUE_TIME_SCHEMA),
    "launch_statistics": (launch_table, LAUNCH_SCHEMA),
    "operator_costs": (operator_costs, COST_SCHEMA),
    "roofline": (roofline_table, TABLE_SCHEMA),
    "tensor_cores": (tensor_core_table, TENSOR_CORE_TABLE),
    "operator_places": (operator_places, ATTRIBUTION_SCHEMA),
    "work_places": (work_places, ATTRIBUTION_SCHEMA),
}
"""Name -> the function that makes the table, and its columns.

`operator_costs` and `operator_places` have the rows of `operators`, `work_places` those of `device_work`."""
