"""HTML reports: single files that work offline."""
