"""The command line `reft-cli`. It asks daemons over gRPC and does not import torch."""
