"""What a snapshot contains: tensors, parameters and small host objects, and how reft finds them."""
