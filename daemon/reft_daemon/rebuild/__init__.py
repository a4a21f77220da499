"""Makes the slots of lost ranks again."""
