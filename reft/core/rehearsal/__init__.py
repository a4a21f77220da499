"""Judges a rehearsal: two runs of one script, one of them killed and restarted.

records of run A, records of run B ─► attempts (one a start of a rank)
    steps before the kill ─► equal?  no ─► the script is not deterministic by itself
    steps after the kill  ─► equal?  no ─► the first difference ─► likely causes with remedies
    objects that are alive and not in state= ─► forgotten state
"""
