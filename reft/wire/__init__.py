"""What reft says and writes: messages, the slot format, the capsule's bytes. No torch, and no decisions."""
