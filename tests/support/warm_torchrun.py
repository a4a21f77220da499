"""torchrun with workers forked from a process that has imported their modules.

    python -m tests.support.warm_torchrun MODULE+MODULE ARGUMENT…

It does what `--rdzv-conf=warm=yes` does. A trainer takes longer for its imports than for thirty
steps.
"""

from __future__ import annotations

import sys

from torch.distributed.run import main

from reft.elastic.warm.warm import begin

if __name__ == "__main__":
    modules = sys.argv.pop(1)
    sys.argv[0] = "torchrun"
    warm = begin(modules)
    try:
        main()
    finally:
        warm.close()
