"""Decides when each byte of a snapshot is copied, and finds the gaps of an iteration."""
