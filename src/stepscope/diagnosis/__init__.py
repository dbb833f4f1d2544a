"""From tables to reasons: rules, findings and their ranking."""
