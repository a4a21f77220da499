"""Storage: a child of the daemon writes checkpoints there, and reads them."""
