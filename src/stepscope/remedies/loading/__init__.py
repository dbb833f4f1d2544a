"""Input that does not hold up the step: batches copied ahead, settings of a DataLoader, less padding."""
