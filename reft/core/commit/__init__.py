"""The life of a slot, and the round that makes a version whole."""
