"""Erasure codes, and where data and parity lie."""
