"""Experiment harness for Mixture-of-Experts inference when the model does not fit the GPU."""

__version__ = "0.1.0"
