"""Small pipelines that schedule very differently from VSLPipe, kept to prove that the core needs no change for them."""
