"""Scripts that run in the environments of other projects; benchmarks/support/peers.py starts them."""
