"""Input that does not stall the step: batches copied ahead, DataLoader settings, less padding."""
