"""Commands that make programs faster and prove it."""
