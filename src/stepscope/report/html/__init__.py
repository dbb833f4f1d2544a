"""Reports for a browser: single files that work offline."""
