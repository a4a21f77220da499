"""The decisions of reft, as pure functions and state machines.

No clock, thread, socket, file or torch.
"""
