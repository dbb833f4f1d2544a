"""Render diagnoses as text, JSON, Markdown and HTML. Functions here are pure; the commands write the files."""
