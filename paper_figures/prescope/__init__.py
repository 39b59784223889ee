"""Report on PreScope, beside what the paper publishes."""
