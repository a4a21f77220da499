"""Recomputes optimizer state from recorded gradients, with torch's own optimizers.

The replayer uses it for each turn, a trainer uses it in a restore.
"""
