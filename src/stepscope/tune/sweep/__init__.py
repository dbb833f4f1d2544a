"""Hyperparameters, searched for the best value of a metric."""
