"""Training makes small models whose routing is learned. No run imports it: `python -m harness.training` does."""
