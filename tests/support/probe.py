"""A worker that writes down its arguments, environment and signals: `probe.py OUT [how to end]`.

It needs only the standard library.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD, signal.SIGHUP)


def look() -> dict[str, object]:
    main = sys.modules["__main__"]
    return {
        "name": __name__, "file": __file__, "main": main.__dict__ is globals(), "package": __package__,
        "spec": main.__spec__ and main.__spec__.name, "doc": main.__doc__,
        "names": sorted(name for name in globals() if not name.startswith("__")),
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "folder": os.getcwd(),
        "environment": dict(os.environ), "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
        "targets": [os.readlink(f"/proc/self/fd/{number}") for number in range(3)],
        "unbuffered": [sys.stdout.write_through, sys.stderr.write_through],
        "signals": [str(signal.getsignal(each)) for each in SIGNALS],
        "mask": [str(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "parent": os.getppid(), "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
        "threads": len(os.listdir("/proc/self/task")), "main_thread": threading.current_thread().name,
        "umask": os.umask(0o022),
    }  # fmt: skip


def main() -> None:
    with open(sys.argv[1], "w") as file:
        json.dump(look(), file)
    print("printed")
    ending = sys.argv[2]
    if ending == "wait":
        sys.stdin.read()
        threading.Event().wait()
    if ending == "interrupt":
        raise KeyboardInterrupt
    if ending == "raise":
        raise ValueError("on purpose")
    if ending == "say":
        sys.exit("said")
    sys.exit(int(ending))


if __name__ == "__main__":
    main()
