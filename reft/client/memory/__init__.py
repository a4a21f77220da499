"""Memory pages, pinned memory, copy threads, and XOR on tensors."""
