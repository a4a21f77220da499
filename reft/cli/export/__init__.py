"""Writes a step of a job as files that anyone can load."""
