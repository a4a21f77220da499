"""Repairs damaged slots whose state exists once, and damaged parity, among real daemons."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from reft.cli.main import main
from reft.core.commit.version import Version
from reft.errors import AttachError
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import SlotFile
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.rebuild.repair import _repair_parity, repair_next
from reft_daemon.registry import Registry
from tests.daemon.rebuild.test_rebuild import contents, mapped
from tests.daemon.rebuild.test_rebuild_sections import SlotsJob
from tests.daemon.rebuild.test_repair import Channels, EagerDaemon, later, with_damage
from tests.support.daemons import DaemonProcess, until
from tests.support.exchange import CHUNK, SIZES
from tests.support.jobs import epoch_of
from tests.support.trainer_forks import Trainer

LANES = {"one loss": (SIZES, -1), "two losses": ((*SIZES, 6 * CHUNK + 5), 2)}


@contextlib.contextmanager
def protected(start: Callable[..., DaemonProcess], trainer: Trainer, lane: str, **first: Any) -> Iterator[SlotsJob]:
    """Yields a job whose step 1 is protected. The last node's daemon scrubs and repairs at once.

    Args:
        first: arguments of the first node's daemon.
    """
    sizes, tolerate = LANES[lane]
    listen = ("--listen", "127.0.0.1:0", "--node")
    daemons = [start(*listen, f"n{i}", **({} if i else first)) for i in range(len(sizes) - 1)]
    daemons.append(EagerDaemon(*listen, f"n{len(sizes) - 1}"))
    with contextlib.closing(daemons[-1]):
        job = SlotsJob(daemons, sizes, trainer, tolerate).begin()
        assert job.lane.f == max(tolerate, 1)
        job.seal(1)
        job.await_protected(1)
        yield job


def end(job: SlotsJob, trainer: Any) -> None:
    trainer.kill()
    until(lambda: not any(r.alive for d in job.daemons for r in d.status("job").ranks), what="the trainers' end")


def flip(path: Path, offset: int) -> None:
    """Changes one bit of a slot's data."""
    with path.open("r+b") as file:
        file.seek(mapped(path).header.geometry.data_offset + offset)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def slot_of(job: SlotsJob, step: int, is_parity: bool = False) -> Path:
    """Returns the file of the last node's slot with a step."""
    reply = job.daemons[-1].call("Inventory", pb.InventoryRequest(job="job"))
    (name,) = [each.slot for each in reply.slots if each.version.step == step and each.parity is is_parity]
    return job.daemons[-1].folder / "job" / name


def parity_of(path: Path) -> tuple[bytes, bytes, str]:
    """Returns what a parity slot contains; it has no table and no capsule."""
    slot = mapped(path)
    header = slot.header
    return (
        slot.data[: header.data_bytes].tobytes(), slot.digests[: slot.chunks].tobytes(),
        repr((header.rank, header.state, header.version, header.layout)),
    )  # fmt: skip


def await_repair(job: SlotsJob) -> None:
    until(lambda: job.daemons[-1].call("Status", pb.StatusRequest()).repaired_slots == 1, what="a repair")


def survives(job: SlotsJob, *nodes: str) -> bool:
    question = ["status", "--job", "job", "--daemon", job.daemons[0].address, "--what-if", f"lose={','.join(nodes)}"]
    return CliRunner().invoke(main, question).exit_code == 0


@pytest.mark.parametrize("lane", LANES)
def test_a_changed_bit_of_state_that_exists_once_is_repaired_from_parity(start, trainer, lane):
    with protected(start, trainer, lane) as job:
        end(job, trainer)
        path, rank = slot_of(job, 1), len(job.daemons) - 1
        saved = contents(path)
        flip(path, job.placement.rank_placement(rank).unreplicated_offset + CHUNK)
        await_repair(job)
        assert not path.exists() and contents(slot_of(job, 1)) == saved


@pytest.mark.parametrize("lane", LANES)
def test_a_changed_bit_of_parity_is_repaired_from_the_slots_of_the_lane(start, trainer, lane):
    with protected(start, trainer, lane) as job:
        path, lost = slot_of(job, 1, is_parity=True), [f"n{i}" for i in range(job.lane.f)]
        saved = parity_of(path)
        end(job, trainer)
        flip(path, CHUNK)
        await_repair(job)
        assert not path.exists() and parity_of(slot_of(job, 1, is_parity=True)) == saved
        assert survives(job, *lost)
        assert job.exchange(-1).protected == 1 and job.exchange(-1).turn == -1


def test_a_version_that_no_turn_protected_stays_damaged(start, trainer):
    failpoint = {"REFT_FAILPOINTS": "turn.ticket:drop:from=2"}
    with protected(start, trainer, "one loss", environment=failpoint) as job:
        job.seal(2)
        until(lambda: job.whole(2) == 2, what="a whole step")
        end(job, trainer)
        path = slot_of(job, 2)
        flip(path, job.placement.rank_placement(2).unreplicated_offset + CHUNK)
        log = job.daemons[-1].log
        until(lambda: "stays damaged" in log.read_text(), what="a try to repair")
        (line,) = [each for each in log.read_text().splitlines() if "stays damaged" in each]
        assert "step 2" in line and "their guard lane has no complete parity of this step" in line
        assert path.exists() and not job.daemons[-1].call("Status", pb.StatusRequest()).repaired_slots


def test_parity_of_an_earlier_attach_is_not_made_again():
    job: Any = SimpleNamespace(epoch=epoch_of(2), guard_lanes=(), ranks=[0])
    slot: Any = SimpleNamespace(rank=0)
    with pytest.raises(AttachError, match=r"step 1 \(epoch 1\) is of an earlier attach"):
        _repair_parity(None, job, slot, Version(epoch_of(1), 1)).send(None)  # type: ignore[arg-type]


def test_the_nodes_of_the_guards_attach_are_asked_too(request_of_rank_3):
    asked: list[str] = []

    class Asking(Channels):
        async def call(self, node: pb.Node, *args: Any, **kwargs: Any):
            asked.append(node.name)
            return await super().call(node, *args, **kwargs)

    async def act(registry: Registry, job: JobRecord, _: SlotFile) -> None:
        job.record.guard_manifest.CopyFrom(job.record.manifest)
        job.record.guard_manifest.nodes.add(name="earlier", id="earlier", addresses=["unix:/nowhere"])
        peers.silent = {"earlier"}
        await repair_next(registry, {}, later())
        assert "earlier" in asked and registry.scrubbed.repaired == 1

    peers = Asking()
    with_damage(request_of_rank_3, peers, act)
