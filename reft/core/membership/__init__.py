"""Decides which nodes live, which node watches which, and the agents' reaction to losses."""
