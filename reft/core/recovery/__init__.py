"""What can come back after a loss, and how."""
