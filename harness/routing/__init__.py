"""Routing without a model tells, from the token alone, which experts that token goes to: invented or recorded.
Torch-free."""
