"""Checks of one part of the machine each."""
