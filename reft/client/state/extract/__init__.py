"""State extraction, one file a family: where the tensors of a trainer's objects lie, and what each is in the whole job."""
