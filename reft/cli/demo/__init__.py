"""The demo: pretend nodes on this computer, faults, and the proof that nothing was lost.

run        what `reft-cli demo` does: two trainings, one with faults ─► report
scenario   one training with its faults: launch, watch, kill
cluster    daemons and torchrun agents as processes, in their own folders
clean_up   a process that ends and removes all of that, however its owner ended
records    what the trainers wrote; pure comparison
screen     what the user sees meanwhile

Tests use it too.
"""
