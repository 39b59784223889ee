"""MoE-Gen collects the tokens of many micro-batches for each expert (module-based batching)."""
