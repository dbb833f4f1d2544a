"""Attention that never materializes the score matrix."""
