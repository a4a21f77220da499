"""Decides the health, protection and possible losses that people are told."""
