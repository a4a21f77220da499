"""Decides what people are told: health, protection, possible losses."""
