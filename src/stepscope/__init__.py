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
    from stepscope.capture.agent import start_server
    from stepscope.capture.annotations import annotate, step
    from stepscope.capture.profile import profile
    from stepscope.capture.schedule import schedule
    from stepscope.capture.telemetry.log import log, telemetry
    from stepscope.compare import Comparison, compare_traces
    from stepscope.diagnosis import Diagnosis, Finding, diagnose
    from stepscope.errors import StepscopeError
    from stepscope.readers import open_trace
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
    "annotate": "stepscope.capture.annotations",
    "compare_traces": "stepscope.compare",
    "diagnose": "stepscope.diagnosis",
    "log": "stepscope.capture.telemetry.log",
    "open_trace": "stepscope.readers",
    "profile": "stepscope.capture.profile",
    "schedule": "stepscope.capture.schedule",
    "start_server": "stepscope.capture.agent",
    "step": "stepscope.capture.annotations",
    "telemetry": "stepscope.capture.telemetry.log",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stepscope' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
