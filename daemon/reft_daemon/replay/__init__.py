"""Recomputes copies of other ranks' optimizer state, in a child process that has torch."""
