"""One job on this node: its record, leases, capsules, and reads of its slots."""
