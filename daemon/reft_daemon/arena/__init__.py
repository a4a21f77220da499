"""Memory: the slots of a node, their pages, and the limits on them."""
