"""The agents' store: torch's TCPStore in a process of its own, or etcd."""
