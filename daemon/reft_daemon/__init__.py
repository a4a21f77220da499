"""The daemon of one node: owns the slots, serves trainers and the CLI, carries the round.

The daemon does not import torch.
"""

from reft.config import silence_grpc

silence_grpc()  # here, because this module is imported before grpc

__version__ = "0.1.0"
