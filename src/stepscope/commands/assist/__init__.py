"""Commands that other programs speak to."""
