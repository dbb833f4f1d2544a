"""A simulated machine whose true causes of idle time are known, written out as a profiler would.

``machine`` runs a program, ``truth`` says why its devices were idle, ``kineto`` writes the trace, ``programs`` holds
ready-made programs and ``strategies`` random ones. Nothing here imports stepscope.
"""

from tests.simulator.kineto import KinetoOptions, kineto_bytes, write_kineto
from tests.simulator.machine import Machine
from tests.simulator.truth import CAUSES, DeviceTruth, IdlePiece, StepTruth, Truth, merge_pieces

__all__ = [
    "CAUSES",
    "DeviceTruth",
    "IdlePiece",
    "KinetoOptions",
    "Machine",
    "StepTruth",
    "Truth",
    "kineto_bytes",
    "merge_pieces",
    "write_kineto",
]
