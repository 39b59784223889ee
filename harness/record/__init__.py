"""Turn spans and passes into what a run leaves behind: metrics, traces, run folders and tables. Torch-free."""
