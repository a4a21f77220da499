"""Copies live tensors into a slot while training goes on."""
