"""What the daemon serves: gRPC, and the sockets of its own node."""
