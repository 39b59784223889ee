"""The benchmarks share data, interleaved rounds, ceilings, baselines and external peers, which are all here."""
