"""Read command lines: the arguments of `python -m` commands, and the overrides of Hydra's settings."""
