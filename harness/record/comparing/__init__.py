"""Finished runs beside each other: what differs between them, repeats with their spread, ratios to a baseline."""
