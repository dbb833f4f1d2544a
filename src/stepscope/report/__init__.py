"""From a diagnosis to text, JSON, Markdown and HTML: pure functions; writing files is the commands' part."""
