"""Rebuilds the slots of lost ranks."""
