"""Search by trials: which remedies make a program faster, and which hyperparameters make it better."""
