"""Commands about hardware that the user does not have yet."""
