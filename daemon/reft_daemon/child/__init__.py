"""The child processes of a daemon, and what they share with the daemon."""
