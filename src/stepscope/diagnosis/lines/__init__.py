"""What the trace shows about costly lines of the user's code, whichever rule they concern."""
