"""Workers forked from a process that has imported torch."""
