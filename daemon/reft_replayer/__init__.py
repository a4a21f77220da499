"""The replayer: a child process of the daemon, which recomputes optimizer state on the host.

It needs torch, which the daemon does not load.
"""
