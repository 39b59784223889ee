"""Let several GPUs share a model: one resource a GPU, steps that reach all of them, and collectives between them."""
