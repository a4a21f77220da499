"""The user's data loader, wrapped so that a restart goes on with the next batch."""
