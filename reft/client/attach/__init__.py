"""Attach: all ranks agree on the job, and on the version that the job starts from."""
