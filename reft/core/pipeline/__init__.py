"""Decides when each byte of a snapshot is copied. It also finds the gaps of an iteration."""
