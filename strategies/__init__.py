"""One package a strategy; each offers `Config` and `build(config, engine) -> Strategy`."""
