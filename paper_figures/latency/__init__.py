"""Compare the systems for small batches on PreScope's models, machines and batches: Figs. 12 and 14."""
