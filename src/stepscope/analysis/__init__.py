"""Plain functions from a trace to a table."""
