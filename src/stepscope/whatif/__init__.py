"""The dependency graph of a trace, replayed with a change: what a step would take."""

from stepscope.whatif.build import build_graph
from stepscope.whatif.experiment import Change, Experiment, Outcome
from stepscope.whatif.graph import Graph, Replay, replay

__all__ = ["Change", "Experiment", "Graph", "Outcome", "Replay", "build_graph", "replay"]
