"""Compute MoE-Gen's tables and figures, simulated and emulated, beside what the paper publishes."""
