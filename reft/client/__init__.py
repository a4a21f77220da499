"""The part of reft in the trainer: finds the state, copies it into slots, restores it.

`register_extractor(kind, extractor)` adds an extractor for a kind of object that reft does not
know.
"""

from reft.client.state.extract.registry import Extractor, register_extractor

__all__ = ["Extractor", "register_extractor"]
