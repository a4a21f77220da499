"""The daemon of one node: owns the arena of slots, serves trainers and the CLI, carries the round. No torch."""

__version__ = "0.1.0"
