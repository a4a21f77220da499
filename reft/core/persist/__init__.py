"""Checkpoints on storage: their names, which of them counts, and which are kept."""
