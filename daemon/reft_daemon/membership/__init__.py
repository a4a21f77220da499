"""Signs of life: heartbeats, and the watch over a job's nodes."""
