"""Leaves, cells and regions: which bytes a state has, and which ranks hold them."""
