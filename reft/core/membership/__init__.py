"""Decides which nodes live, which node watches which, and what agents do about a loss."""
