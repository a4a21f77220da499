"""Restores live tensors and host state from slots, and decodes lost slots."""
