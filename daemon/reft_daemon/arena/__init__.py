"""The memory of a node: slots, the pages of slots, and the limits on both."""
