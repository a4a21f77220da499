"""The demo's stage: pretend nodes on this computer, faults, and the proof that nothing was lost. Tests use it too.

run        what `reft-cli demo` does: two trainings, one disturbed ─► report
scenario   one training with its faults: launch, watch, kill
cluster    daemons and torchrun agents as processes, in folders of their own
keeper     a process that ends and removes all of that, however its owner ended
records    what the trainers wrote; pure comparison
screen     what a person sees meanwhile
"""
