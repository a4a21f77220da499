"""The gaps of an iteration, and when each byte is copied."""
