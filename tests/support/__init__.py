"""Helpers for all tests: real daemons, real trainers, and waits for a condition."""
