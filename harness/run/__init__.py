"""Take a run from its settings to its records."""
