"""Measure the costs of a machine's ops, of its lanes together and of the strategy's thread; the simulator trusts
them."""
