"""The sentences of reports: pure functions from results to text."""
