"""The choices of the `routing` group: one module each, with `Config` and `build(config, model, seed)`."""
