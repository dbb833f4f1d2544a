"""Commands that read a trace."""
