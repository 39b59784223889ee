"""What the benchmarks share: data, interleaved rounds, ceilings, baselines and external peers."""
