"""Which nodes live, who watches whom, and what agents do about a loss."""
