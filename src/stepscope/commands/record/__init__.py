"""Commands that record programs."""
