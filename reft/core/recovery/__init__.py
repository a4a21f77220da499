"""Decides which version can be restored after a loss, and how."""
