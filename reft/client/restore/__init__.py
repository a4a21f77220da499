"""Copies slots into live tensors, and decodes what is lost."""
