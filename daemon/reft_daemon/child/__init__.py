"""The child processes of a daemon, and the channel to each."""
