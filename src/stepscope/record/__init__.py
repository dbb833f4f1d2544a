"""Record a running program into a trace."""
