"""Export traces to other tools' formats, one module each; a format is a generator of bytes or a folder of files."""
