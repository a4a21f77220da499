"""What `reft-cli demo` trains: a small language model, written as any user's script would be."""
