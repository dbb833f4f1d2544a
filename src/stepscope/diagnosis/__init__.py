"""Diagnosis: rules turn a trace's tables into findings, ranked by their saving."""

from stepscope.diagnosis.diagnosis import Diagnosis, diagnose, diagnose_view
from stepscope.diagnosis.finding import Finding

__all__ = ["Diagnosis", "Finding", "diagnose", "diagnose_view"]
