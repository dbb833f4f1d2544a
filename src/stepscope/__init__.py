"""Why a deep-learning step is slow, which line is to blame, what to change and how much it saves.

    trace = stepscope.open_trace("trace.json.gz")
    diagnosis = stepscope.diagnose(trace)
    for finding in diagnosis.findings:
        print(finding.title, finding.saving_ns_per_step)

Importing the package is cheap: what a name needs is imported when the name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.compare import Comparison, compare_traces
    from stepscope.diagnosis import Diagnosis, Finding
    from stepscope.diagnosis.diagnosis import diagnose
    from stepscope.errors import StepscopeError
    from stepscope.readers import open_trace
    from stepscope.record.agent.server import start_server
    from stepscope.record.annotations import annotate, step
    from stepscope.record.profile import profile
    from stepscope.record.schedule import schedule
    from stepscope.record.telemetry.log import log, telemetry
    from stepscope.trace import Trace, Window

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "Diagnosis",
    "Finding",
    "StepscopeError",
    "Trace",
    "Window",
    "__version__",
    "annotate",
    "compare_traces",
    "diagnose",
    "log",
    "open_trace",
    "profile",
    "schedule",
    "start_server",
    "step",
    "telemetry",
]

_HOMES = {
    "Comparison": "stepscope.compare",
    "Diagnosis": "stepscope.diagnosis",
    "Finding": "stepscope.diagnosis",
    "StepscopeError": "stepscope.errors",
    "Trace": "stepscope.trace",
    "Window": "stepscope.trace",
    "annotate": "stepscope.record.annotations",
    "compare_traces": "stepscope.compare",
    "diagnose": "stepscope.diagnosis",
    "few_lines": "stepscope.report.notebook",
    "first_screen": "stepscope.report.notebook",
    "load_ipython_extension": "stepscope.integrations.magics",
    "log": "stepscope.record.telemetry.log",
    "memory_use": "stepscope.integrations.notebook",
    "open_trace": "stepscope.readers",
    "page_widget": "stepscope.integrations.notebook",
    "predicted": "stepscope.integrations.notebook",
    "profile": "stepscope.record.profile",
    "schedule": "stepscope.record.schedule",
    "start_server": "stepscope.record.agent.server",
    "step": "stepscope.record.annotations",
    "telemetry": "stepscope.record.telemetry.log",
    "unload_ipython_extension": "stepscope.integrations.magics",
    "what_if": "stepscope.integrations.notebook",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stepscope' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
