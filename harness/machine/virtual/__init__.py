"""Hold what the simulated machine needs instead of tensors: costs of ops, contention, and the values that ops bring."""
