"""Checks of the machine, one module for each of its parts."""
