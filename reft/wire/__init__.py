"""Defines what reft sends and stores: messages and formats. No torch, no decisions."""
