"""The daemon of one node: owns the slots, serves trainers and the CLI, carries the round.

The daemon does not import torch.
"""

__version__ = "0.1.0"
