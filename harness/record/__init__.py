"""What a run leaves behind: spans and passes in, metrics, traces, run folders and tables out. Torch-free."""
