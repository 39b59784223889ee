"""Micro-benchmarks of the kernels, and reports that run whole experiments."""
