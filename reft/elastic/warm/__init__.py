"""Workers that are forked from a process that has imported torch."""
