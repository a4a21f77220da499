"""Records what `reft-cli rehearse` compares. Imported only if REFT_REHEARSE is set."""
