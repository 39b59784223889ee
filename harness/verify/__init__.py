"""Checks generated tokens against Hugging Face transformers, for the same checkpoint and prompts."""
