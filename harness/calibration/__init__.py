"""Measured costs of a machine's ops, of its lanes together and of the strategy's thread: what the simulator trusts."""
