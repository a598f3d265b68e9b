"""Models: where they come from and how a packed batch runs through them."""
