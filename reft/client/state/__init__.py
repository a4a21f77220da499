"""Names what is held: tensors, parameters and small host objects."""
