"""Extractors: how reft finds the state of each family of trainers."""
