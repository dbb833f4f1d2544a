"""Dependency graph of a trace, replayed with changes to predict the step time."""

from stepscope.whatif.build import build_graph
from stepscope.whatif.experiment import Change, Experiment, Outcome
from stepscope.whatif.graph import Graph, Replay, replay

__all__ = ["Change", "Experiment", "Graph", "Outcome", "Replay", "build_graph", "replay"]
