"""One job on this node: the record, leases, capsules, and reads of its slots."""
