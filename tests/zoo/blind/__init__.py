"""Programs as people write them, each with one planted fault, written without a look at the rules."""
