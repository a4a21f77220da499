"""A daemon that scrubs and repairs slots at once: `python -m tests.support.eager_daemon`."""

from __future__ import annotations

from reft_daemon.jobs import scrub
from reft_daemon.main import main
from reft_daemon.rebuild import repair

if __name__ == "__main__":
    scrub.IDLE_S = scrub.AGAIN_S = 0.0
    scrub.NOTHING_S = repair.LOOK_S = 0.05
    repair.AGAIN_S = 1.0
    main()
