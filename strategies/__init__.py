"""Each strategy is a package that offers `Config` and `build(config, engine) -> Strategy`."""
