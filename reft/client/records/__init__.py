"""Records the gradients of each mark, from which another process recomputes optimizer state."""
