"""torchrun whose workers are forked from one process that has imported what they would: `python -m … MODULE+MODULE ARGUMENT…`.

What `--rdzv-conf=warm=yes` does, under torch's own rendezvous. A trainer takes longer to import than to train thirty steps of.
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
