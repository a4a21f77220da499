"""Decides when to copy: the phases of an iteration, and the due steps."""
