"""What a person types: `reft-cli`. Asks daemons over gRPC; imports no torch."""
