"""Attention that never holds the scores."""
