"""Leaves, cells and regions: which bytes a state has, and who else holds them."""
