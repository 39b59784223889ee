"""Parts that several strategies compose."""
