"""`python -m reft_daemon.persist`: the persister's process. Only a daemon starts it."""

from __future__ import annotations

import argparse
import logging
import os
import socket
from pathlib import Path

from reft.log_lines import begin_log
from reft_daemon.child.child_setup import become_child
from reft_daemon.persist.child import StorageServer
from reft_daemon.persist.persist_key import read_key
from reft_daemon.persist.storage_root import open_root

OOM_SCORE = 900  # a lost persister costs one attempt
NICE = 19


def main() -> None:
    """Serves one daemon until the channel to the daemon ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--root", required=True)
    parser.add_argument("--key-file", type=Path)
    settings = parser.parse_args()
    begin_log()
    become_child(OOM_SCORE, NICE)
    channel = socket.socket(fileno=settings.channel)
    try:
        key = read_key(settings.key_file) if settings.key_file else None
        StorageServer(channel, open_root(settings.root), key).run()
    except Exception:
        logging.exception("the persister can't begin")
    finally:
        os._exit(0)  # threads may be waiting for storage


if __name__ == "__main__":
    main()
