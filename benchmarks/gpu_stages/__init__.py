"""The stages of benchmarks/gpu.py."""
