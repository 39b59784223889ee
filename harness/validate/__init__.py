"""Measure how far to trust the simulator, strategy by strategy."""
