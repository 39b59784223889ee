"""The benchmarks measure single kernels; their reports also run whole experiments."""
