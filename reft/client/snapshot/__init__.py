"""Copies live tensors into a slot, beside training."""
