"""Programs of users, run with errors put into stepscope's entries: what they print and return must stay the same."""
