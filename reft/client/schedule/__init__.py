"""When to copy: the phases of an iteration, and which steps are due."""
