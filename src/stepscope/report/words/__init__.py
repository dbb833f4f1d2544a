"""What reports say, in sentences: pure functions from results to text."""
