"""Communicates with this node's daemon and with the other ranks."""
