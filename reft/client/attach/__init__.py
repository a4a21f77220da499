"""All ranks agree what this job is, and what it starts from."""
