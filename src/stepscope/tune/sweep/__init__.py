"""Search hyperparameters for the best value of a metric."""
