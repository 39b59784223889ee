"""Which experts a token goes to where no model runs: invented or recorded, by the token alone. Torch-free."""
