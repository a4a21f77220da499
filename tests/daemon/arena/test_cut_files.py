"""Another process cuts files of a living daemon: an error of that file, and no signal."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import grpc
import pytest

from reft.core.commit.slots import SlotState
from reft.wire import rpc
from reft.wire.slot_format import PAGE
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from tests.support.daemons import DaemonProcess, until
from tests.support.exchange import SIZES, ShardedJob
from tests.support.jobs import CHUNK, Code, Job, write
from tests.support.trainer_forks import Trainer

SEALED = SlotState.SEALED

# A slot is at hand, and its size was found right, when its file is cut. A mapping would end the
# process by SIGBUS, so all of this happens in a process of its own.
HELD_WHILE_CUT = """
    import os, sys, tempfile
    from pathlib import Path
    import numpy as np
    from reft.core.commit.slots import SlotState
    from reft.core.commit.version import Epoch, Version
    from reft.errors import FormatError
    from reft.wire.slot_format import Geometry
    from reft_daemon.arena.arena import Arena

    geometry = Geometry(4096, 3 * 4096, 4096)
    version = Version(Epoch(1, bytes(16)), 1)
    with tempfile.TemporaryDirectory(prefix="reft-test-", dir="/dev/shm") as folder:
        arena = Arena(Path(folder) / "arena", 0)
        for i, nbytes in enumerate((0, 100, 4096 + 7, geometry.digests_offset, geometry.data_offset, geometry.file_bytes - 1)):
            (slot,) = arena.create("job", 0, {f"rank-0.slot-{i}": geometry}, [])
            held = slot.map
            held.begin(version, bytes(16), b"table", 3 * 4096)
            held.put_capsule(b"capsule")
            held.write(0, np.ones(3 * 4096, np.uint8))
            held.landed()
            held.sealed(np.fromiter(held.digests_of(0, 3), np.uint64))
            os.truncate(slot.path, nbytes)
            refused = set()
            for name, act in {
                "header": held.reread, "table": held.table, "capsule": held.capsule, "digests": lambda: held.digests,
                "chunks": held.bad_chunks, "map": lambda: slot.map,
            }.items():
                try:
                    act()
                except FormatError:
                    refused.add(name)
            print(nbytes, *sorted(refused))
            for act in (lambda: held.sealed(held.digests), held.empty, lambda: held.write(4096, np.ones(9, np.uint8))):
                try:
                    act()
                except FormatError:
                    pass
            arena.free(slot)
        arena.forget("job")
        arena.close()
"""


def test_a_slot_that_is_cut_while_it_is_used_is_an_error_and_no_signal():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HELD_WHILE_CUT)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    refused = {int(line.split()[0]): set(line.split()[1:]) for line in done.stdout.splitlines()}
    everything = {"header", "table", "capsule", "digests", "chunks", "map"}
    data, whole = sorted(refused)[-2:]
    assert {nbytes: words for nbytes, words in refused.items() if nbytes <= PAGE + 7} == dict.fromkeys(
        (0, 100, PAGE + 7), everything
    )
    assert refused[data] == refused[whole] == {"header", "chunks", "map"}, "what lies before the data is there"


def ask_everything(job: Job, daemon: DaemonProcess) -> None:
    """Asks for all that a daemon reads of a job; errors are answers, too."""
    with rpc.channel(daemon.address) as channel:
        stub = pb_grpc.DaemonStub(channel)
        stub.Status(pb.StatusRequest(deep=False), timeout=20)
        inventory = stub.Inventory(pb.InventoryRequest(job=job.name), timeout=20)
        for slot in (*inventory.slots, *inventory.records):
            try:
                request = pb.ReadRequest(job=job.name, slot=slot.slot, version=slot.version, size=1 << 40, checked=True)
                list(stub.Read(request, timeout=20))
            except grpc.RpcError as error:
                assert error.code() in (Code.DATA_LOSS, Code.FAILED_PRECONDITION, Code.NOT_FOUND)
        for capsule in inventory.capsules:
            try:
                request = pb.CapsuleRequest(job=job.name, rank=capsule.rank, version=capsule.version)
                stub.FetchCapsule(request, timeout=20)
            except grpc.RpcError as error:
                assert error.code() in (Code.DATA_LOSS, Code.NOT_FOUND)


@pytest.mark.parametrize(
    "kind", ["rank-0.slot-*", "parity-0.slot-*", "record-0.slot-*", "capsule-*", "record.*", "pins"]
)
def test_cut_files_of_one_job_end_no_daemon_and_no_other_job(start, kind):
    daemons = [start() for _ in range(2)]
    trainer = Trainer()
    job = ShardedJob(daemons, SIZES[:2], trainer).begin()
    job.lease(0, trainer, slots=0, records=2, record_bytes=CHUNK)
    job.seal(1)
    job.await_protected(1)
    other = Job([(daemons[0], [0])], name="other").decide()
    files = sorted((daemons[0].folder / "job").glob(kind))
    assert files, kind
    pid = daemons[0].process.pid
    for cut in (lambda n: n - 1, lambda n: n // 2, lambda n: min(n, PAGE + 7), lambda n: min(n, 40), lambda n: 0):
        for path in files:
            if path.exists():
                os.truncate(path, cut(path.stat().st_size))
        ask_everything(job, daemons[0])
    trainer.kill()
    until(lambda: not any(rank.alive for rank in daemons[0].status("job").ranks), what="the news of the death")
    ask_everything(job, daemons[0])
    write(other.slots(0)[0], other.version(1))
    assert SEALED in {state for state, _ in other.headers().values()}
    assert daemons[0].process.pid == pid and daemons[0].answers()
