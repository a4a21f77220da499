"""Defines the messages and formats that reft sends and stores. No torch, no decisions."""
