"""Analyses: plain functions from a trace to a table."""
