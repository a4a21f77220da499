"""The servers of the daemon: gRPC, and the sockets on its own node."""
