"""Recording: from a running program to a trace."""
