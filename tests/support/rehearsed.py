"""Stands in for a trainer under `reft-cli rehearse`: writes records, and serves as its daemon.

    python -m tests.support.rehearsed --steps 12 [--fault NAME] [--step-s 0.02] [--agent --ranks 2]

No torch. One process; with --agent, another process starts it, and starts it again when it is
killed. With --ranks 2 that agent ends the other rank first, by SIGTERM, like torchrun. A step's
"state" is a number; a "snapshot" is a file in the runtime folder, which outlives the process, as
slots do. As in a trainer, a failpoint stops the first process in a snapshot. Of several ranks each
stops twice: a rank may reach the failpoint after the kill only. The daemon is another process of
this module; it answers what `rehearse` asks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent import futures
from pathlib import Path

import psutil

FAULTS = ("prefetch", "random", "crash", "fresh", "forgotten", "unseen", "own-daemon", "older-a", "older-b",
          "unheld", "once", "again")  # fmt: skip
OLDER = 3  # the step of an older run
VALIDATED = 9  # this step has a forward in eval mode
START_S = 30.0


def serve(socket: str, fault: str) -> None:
    """Answers Hello and Status as a busy daemon would.

    The first Status fails. In the others every step is whole, or none if the fault is "unheld".
    """
    import grpc

    from reft.wire import messages
    from reft.wire.v1 import daemon_pb2 as pb
    from reft.wire.v1 import daemon_pb2_grpc as pb_grpc

    class FakeDaemon(pb_grpc.DaemonServicer):
        asked = 0

        def Hello(self, request, context):
            return pb.HelloReply(pid=os.getpid(), protocol=messages.PROTOCOL, oldest=messages.PROTOCOL)

        def Status(self, request, context):
            self.asked += 1
            if self.asked == 1:
                context.abort(grpc.StatusCode.UNAVAILABLE, "busy")
            return pb.StatusReply(jobs=[pb.JobStatus(job="fake", whole=0 if fault == "unheld" else 1_000_000)])

    server = grpc.server(futures.ThreadPoolExecutor(2))
    pb_grpc.add_DaemonServicer_to_server(FakeDaemon(), server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    server.wait_for_termination()


def is_living(pid: int) -> bool:
    """Returns whether a process lives; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def train(steps: int, step_s: float, fault: str, outputs: str) -> None:
    """Writes the records of one process."""
    folder = Path(os.environ["REFT_RUNTIME_DIR"])
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    socket, held, pause = folder / "daemon.sock", folder / f"held.{rank}", threading.Event()
    if rank or fault == "own-daemon":
        pass
    elif socket.exists():
        print("daemon lives" if is_living(int((folder / "pid").read_text())) else "daemon is dead", flush=True)
    else:
        daemon = subprocess.Popen([sys.executable, "-m", __spec__.name, "--serve", str(socket), "--fault", fault])
        (folder / "pid").write_text(str(daemon.pid))
        end = time.monotonic() + START_S
        while not socket.exists() and time.monotonic() < end:
            pause.wait(0.01)
    Path(os.environ["REFT_DIR"], "job").mkdir(parents=True, exist_ok=True)
    tempfile.mkstemp()  # like a loader's workers, which SIGKILL keeps from tidying up
    failpoint = re.search(r"from=(\d+):times=1:epoch=1$", os.environ.get("REFT_FAILPOINTS", ""))
    stop_at = int(failpoint[1]) if failpoint and not held.exists() else 0
    if fault == "once" and held.exists():
        raise SystemExit("the folder of outputs exists")
    prefix = os.environ["REFT_REHEARSE"]
    older = OLDER if fault == f"older-{Path(prefix).name}" else 0
    base = int(held.read_text()) if held.exists() and fault != "fresh" else older
    run = f"{os.getpid()}" if fault == "random" else ""
    if outputs:
        Path(outputs).write_text(f"REFT_REHEARSAL={os.environ['REFT_REHEARSAL']}")

    def write(kind: str, **fields: object) -> None:
        line = json.dumps({"kind": kind, "rank": rank, **fields}) + "\n"
        descriptor = os.open(f"{prefix}.{rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)

    restored = "memory" if base else None
    for _ in range(2 if fault == "again" else 1):
        write("attach", world=world, pid=os.getpid(), step=base, restored_from=restored, script="x.py",
              time=time.time(), generators={"torch": f"g{base}"}, state=["data"], regroups=False, hash=1)  # fmt: skip
    shift = 1 if fault == "prefetch" and base else 0
    for step in range(base + 1, steps + 1):
        pause.wait(step_s)  # a step takes so long
        inputs = [] if fault == "unseen" else [f"i{step + shift}{run}"]
        forwards = [] if fault == "unseen" else ["training", *(["eval"] if step == VALIDATED else [])]
        write("mark", step=step, time=time.time(), inputs=inputs, at_batch=None, at_forward={"torch": f"g{step - 1}"},
              generators={"torch": f"g{step}"}, groups={"optimizer.0.0": {"lr": 0.1}}, state={"data": f"d{step}"},
              leaves={"w": f"w{step + shift}"}, forwards=forwards, epoch_ends=[], saves=[])  # fmt: skip
        if step == base + 2 and fault == "forgotten":
            write("alive", step=step, objects=[{"kind": "ema", "type": "AveragedModel", "name": "ema"}])
        if step == stop_at:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # so that the second stop comes
            for _ in range(world):
                os.kill(os.getpid(), signal.SIGSTOP)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        (folder / f"new.{rank}").write_text(str(step))
        (folder / f"new.{rank}").rename(held)  # a killed write must not leave half a number
        if fault == "crash" and step == 3:
            raise SystemExit("the loss is not a number")


def launch(arguments: list[str], world: int) -> None:
    """Runs the trainers; when one is killed, ends the others and starts all again."""
    print("agent begins", flush=True)
    while (code := run_ranks(arguments, world)) < 0:
        print("agent restarts", flush=True)
    raise SystemExit(code)


def run_ranks(arguments: list[str], world: int) -> int:
    """Runs the trainers until one has ended; ends the others, and returns the first one's code."""
    ranks = [{**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world)} for rank in range(world)]
    trainers = [subprocess.Popen([sys.executable, "-m", __spec__.name, *arguments], env=each) for each in ranks]
    _, status = os.wait()
    for each in trainers:
        each.terminate()
        each.wait()
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", default="")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--fault", choices=("", *FAULTS), default="")
    parser.add_argument("--outputs", default="")
    parser.add_argument("--agent", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.fault)
    elif given.agent:
        launch([each for each in sys.argv[1:] if each != "--agent"], given.ranks)
    else:
        train(given.steps, given.step_s, given.fault, given.outputs)
