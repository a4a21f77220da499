"""`reft-cli rehearse`: runs a script twice, kills it once, and compares every bit.

verb      the command line's side: shows lines, returns the exit code
run       what the verb does: run A undisturbed, run B with a kill ─► report
training  one run: its processes, its daemon, its folders, and the kill
records   the lines that `reft.client.rehearsal` writes in the trainers
report    what a person or a script is told

What is decided stands in `reft.core.rehearsal`.
"""
