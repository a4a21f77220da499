"""The mover: a child process of the daemon, which carries the bytes of the exchange."""
