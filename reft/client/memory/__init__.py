"""Pages, pinned memory, copying threads, and XOR on tensors."""
