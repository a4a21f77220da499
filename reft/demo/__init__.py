"""The training of `reft-cli demo`: a small language model, written like any user's script."""
