"""A trace in the formats of other tools: one module a format, each a generator of bytes or a folder of files."""
