"""`python -m reft.elastic.stores.store_host --port PORT`: runs a TCPStore while agents use it.

Agents add to the number under the key BEATS every few seconds. If the number has not changed for
--idle-exit seconds, no agent is left, and the process exits.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import sys
import time

BEATS = "reft/beats"


def main() -> None:
    """Runs the store; prints "ready" on stdout when the store can be used."""
    parser = argparse.ArgumentParser(prog="reft.elastic.stores.store_host")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--idle-exit", type=float, required=True, help="seconds")
    options = parser.parse_args()
    from torch.distributed import TCPStore

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # each agent has two connections
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    store = TCPStore("localhost", options.port, is_master=True, wait_for_workers=False)
    last_count, changed_s = store.add(BEATS, 0), time.monotonic()
    print("ready", flush=True)
    sys.stdout.close()
    while time.monotonic() - changed_s < options.idle_exit:
        time.sleep(min(1.0, options.idle_exit / 4))
        count = store.add(BEATS, 0)
        if count != last_count:
            last_count, changed_s = count, time.monotonic()


if __name__ == "__main__":
    main()
