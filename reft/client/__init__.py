"""What runs in the trainer: finds the state, copies it into slots beside training, and brings it back.

`register_extractor(kind, extractor)` teaches it the state of objects that it does not know.
"""

from reft.client.state.extract.registry import Extractor, register_extractor

__all__ = ["Extractor", "register_extractor"]
