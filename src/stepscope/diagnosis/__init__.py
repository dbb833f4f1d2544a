"""From tables to reasons: rules, findings and their ranking."""

from stepscope.diagnosis.diagnosis import Diagnosis, diagnose, diagnose_view
from stepscope.diagnosis.finding import Finding

__all__ = ["Diagnosis", "Finding", "diagnose", "diagnose_view"]
