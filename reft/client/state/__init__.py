"""Tensors, parameters and small host objects of a snapshot, and the search for them."""
