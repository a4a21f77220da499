"""Tests rebuilding the slots of lost nodes on other daemons: byte for byte, or not at all."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from reft.cli.export.slot_reader import DamagedSlot
from reft.cli.export.sources import MemorySource
from reft.cli.main import main
from reft.cli.survey import survey
from reft.client.snapshot.save_plan import ParityTiling, plan_save
from reft.client.state.tensors import leaf_of
from reft.core.commit.round import StepAnswer
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Version
from reft.wire import capsule_format, messages
from reft.wire.manifest import placement_of
from reft.wire.proof import CERTIFIED
from reft.wire.rebuild_request import rebuild_request
from reft.wire.slot_format import PAGE, Geometry, SlotMap, chunk_digest
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena import capsule_store
from reft_daemon.arena.arena import Arena, SlotFile
from reft_daemon.jobs import leasing
from reft_daemon.jobs.leases import caller_process
from reft_daemon.rebuild.rebuild import Rebuild, _LostSlot
from tests.daemon.jobs.test_leases import decide_request, lease_request
from tests.support import certificates
from tests.support.daemons import DaemonProcess, until
from tests.support.jobs import CHUNK, Code, Job, epoch_of, refused, registry_of, slot_path, tcp_call
from tests.support.manifests import described
from tests.support.proving import ProvingServer, rogue
from tests.support.shards import plain_bytes, slot_data
from tests.support.trainer_forks import Trainer

INLINE = "running_mean"


def tensors_of(rank: int) -> dict[str, torch.Tensor]:
    """Returns a rank's tensors: replicas, a leaf that is never saved, and an inline leaf."""
    same = torch.Generator().manual_seed(1)
    return {
        "w": torch.randn(190, 301, generator=same), "b": torch.randn(77, generator=same).to(torch.bfloat16),
        "late": torch.zeros(1000), INLINE: torch.full((5,), float(rank)),
    }  # fmt: skip


class Held:
    """A job with one rank per node: its trainers are dead, and one version is whole.

    Args:
        daemons: one per node.
        tolerate: how many nodes may be lost.
        steps: the steps that become whole.
    """

    def __init__(
        self, daemons: Sequence[DaemonProcess], tolerate: int, steps: Sequence[int] = (1,),
        **facts: object,
    ) -> None:  # fmt: skip
        leaves = [leaf_of(name, tensor, name == INLINE) for name, tensor in tensors_of(0).items()]
        self.job = Job(
            [(daemon, [rank]) for rank, daemon in enumerate(daemons)], protect="auto", tolerate=tolerate,
            chunk_bytes=CHUNK, **described(*[leaves] * len(daemons)), **facts,
        )  # fmt: skip
        self.job.decide()
        self.placement = placement_of(self.job.manifest)
        self.present = [leaf for leaf in leaves if leaf.name != "late"]
        self.trainer = Trainer()
        for step in steps:
            for rank in range(len(daemons)):
                self.write(rank, step)
            until(lambda step=step: all(self.job.whole(i) == step for i in range(len(daemons))), what="a whole version")

    def write(self, rank: int, step: int) -> None:
        tensors = tensors_of(rank)
        save_plan = plan_save(self.placement, rank, self.present, {}, ParityTiling())
        facts = {"data_bytes": save_plan.data_bytes, "table_bytes": 1 << 14, "slots": 2}
        slots = self.job.slots(rank, self.trainer, **facts)
        slot = min(slots, key=lambda slot: slot.header.version.order if slot.header.version else (0, 0))
        slot.begin(self.job.version(step), save_plan.digest, save_plan.table, save_plan.data_bytes)
        slot.data[: save_plan.data_bytes] = slot_data(self.placement, rank, tensors)
        inline_leaves = {INLINE: self.inline_leaf(rank)}
        slot.put_capsule(capsule_format.encode({"rank": rank, "riders": inline_leaves, "absent": ["late"]}))
        slot.landed()
        slot.sealed(np.array([chunk_digest(slot.chunk(i)) for i in range(slot.chunks)], np.uint64))
        self.job.report(rank, {step: StepAnswer.SEALED})

    def inline_leaf(self, rank: int) -> bytes:
        """Returns the inline leaf that a rank puts into its capsules."""
        return plain_bytes(tensors_of(rank)[INLINE]).tobytes()

    def end(self) -> Held:
        """Kills the trainers."""
        self.trainer.kill()
        until(lambda: not any(r.alive for i, d in enumerate(self.job.daemons) for r in d.status("job").ranks))
        return self

    def path(self, rank: int, step: int = 1) -> Path:
        """Returns the file of a rank's slot of that step, on the rank's own node."""
        reply = self.job.daemons[rank].call("Inventory", pb.InventoryRequest(job="job"))
        name = next(slot.slot for slot in reply.slots if slot.version.step == step)
        return slot_path(self.job.daemons[rank], name)


def mapped(path: Path) -> SlotMap:
    return SlotMap(np.fromfile(path, np.uint8))


def contents(path: Path) -> tuple[bytes, ...]:
    """Returns everything that a slot contains, except where its parts lie."""
    slot = mapped(path)
    header = slot.header
    return (
        slot.data[: header.data_bytes].tobytes(), slot.digests[: slot.chunks].tobytes(), slot.capsule(), slot.table(),
        repr((header.job, header.rank, header.state, header.version)).encode(),
    )  # fmt: skip


class Lost:
    """Nodes that are lost with their folders; with `returns` they come back after the block."""

    def __init__(self, *daemons: DaemonProcess, returns: bool = False) -> None:
        self.daemons, self.returns = daemons, returns

    def __enter__(self) -> None:
        for daemon in self.daemons:
            daemon.kill()
            daemon.folder.rename(f"{daemon.folder}.away")

    def __exit__(self, *_: object) -> None:
        for daemon in self.daemons:
            shutil.rmtree(daemon.folder, ignore_errors=True)
            Path(f"{daemon.folder}.away").rename(daemon.folder)
            if self.returns:
                daemon.start()


def recover(daemon: DaemonProcess, *arguments: str, local: str = ""):
    command = ["recover", "job", "--json", "--daemon", daemon.address, *arguments]
    return CliRunner().invoke(main, command, env={"REFT_DAEMON": local or daemon.address}, catch_exceptions=False)


def cluster(start: Callable[..., DaemonProcess], nodes: int, *flags: str) -> list[DaemonProcess]:
    return [start("--node", f"n{i}", *flags) for i in range(nodes)]


def rebuilt_slot(daemon: DaemonProcess, rank: int) -> Path:
    (path,) = (daemon.folder / "job").glob(f"rank-{rank}.slot-*")
    return path


@pytest.mark.timeout(400)  # 15 pairs of nodes, each killed and started again
@pytest.mark.parametrize(("nodes", "f"), [(4, 1), pytest.param(6, 2, marks=pytest.mark.slow)])
def test_the_slots_of_any_f_lost_nodes_come_back_byte_for_byte(start, nodes, f):
    daemons = cluster(start, nodes)
    held = Held(daemons, f).end()
    spare = start("--node", "spare")
    before = {rank: contents(held.path(rank)) for rank in range(nodes)}
    for lost in itertools.combinations(range(nodes), f):
        asked = daemons[next(rank for rank in range(nodes) if rank not in lost)]
        # gRPC tries to reach a restarted daemon only after a second
        until(lambda asked=asked: not survey(asked.address, "job")[0].silent, what="that all daemons see one another")
        with Lost(*(daemons[rank] for rank in lost), returns=True):
            onto = [word for rank in lost for word in ("--onto", f"n{rank}={spare.address}")]
            planned = recover(asked, *onto)
            assert planned.exit_code == 0, planned.output
            assert [each["ranks"] for each in json.loads(planned.stdout)["lost_nodes"]] == [[rank] for rank in lost]
            assert not list(spare.folder.glob("job/*")), "a plan changes nothing"
            done = recover(asked, "--yes", *onto)
            assert done.exit_code == 0, done.output
            found = json.loads(done.stdout)
            assert found["outcome"] == "rebuilt", done.output
            for rank in lost:
                assert contents(rebuilt_slot(spare, rank)) == before[rank]
            heads = 8192 * (nodes - f) * f
            assert sum(each["read_bytes"] for each in found["rebuilt"]) <= heads + sum(
                each["moved_bytes"] for each in json.loads(planned.stdout)["lost_nodes"]
            )
            again = recover(asked, *onto)
            assert json.loads(again.stdout)["outcome"] == "whole"
            spare.call("Purge", pb.PurgeRequest(job="job"))


@pytest.mark.skipif(bool(certificates.why_not()), reason=certificates.why_not())
def test_a_lost_node_is_rebuilt_by_daemons_with_tls(start, tmp_path):
    flags = certificates.Certificates(tmp_path).flags
    *daemons, spare = (
        start("--node", name, "--listen", "127.0.0.1:0", *flags("ours", name)) for name in ("n0", "n1", "n2", "spare")
    )
    held = Held(daemons, 1).end()
    address = spare.call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL)).addresses[0]
    before = contents(held.path(1))
    with Lost(daemons[1]):
        done = recover(daemons[0], "--yes", "--onto", f"n1={address}")
        assert done.exit_code == 0 and json.loads(done.stdout)["outcome"] == "rebuilt", done.output
        assert contents(rebuilt_slot(spare, 1)) == before


def test_a_loss_of_more_than_f_nodes_is_reported_with_what_is_missing(start):
    daemons = cluster(start, 4)
    Held(daemons, 1).end()
    with Lost(daemons[1], daemons[3]):
        found = recover(daemons[0], "--yes")
        assert found.exit_code == 4
        document = json.loads(found.stdout)
        assert (document["outcome"], document["silent_nodes"]) == ("unrecoverable", ["n1", "n3"])
        text = " ".join(document["missing"])
        assert "ranks 1, 3 (on n1, n3)" in text and "can't be decoded: 2 of 4 slots are gone" in text
        assert "b and 2 more leaves" in text
        plain = CliRunner().invoke(main, ["recover", "job"], env={"REFT_DAEMON": daemons[0].address})
        assert (
            plain.exit_code == 4 and "health  ERR" in plain.stdout and "silent  no answer from n1, n3" in plain.stdout
        )


def status(daemon: DaemonProcess, *arguments: str):
    return CliRunner().invoke(main, ["status", *arguments], env={"REFT_DAEMON": daemon.address}, catch_exceptions=False)


def test_recover_and_what_if_without_a_loss(start):
    daemons = cluster(start, 4)
    Held(daemons, 1).end()
    found = recover(daemons[0], "--yes")
    assert found.exit_code == 0 and json.loads(found.stdout)["outcome"] == "whole"
    shown = json.loads(status(daemons[0], "--json").stdout)
    protection = shown["jobs"][0]["protection"]
    assert (protection["word"], protection["tolerated_domains"], protection["step"]) == ("PROTECTED", 1, 1)
    assert [group["parity_shards"] for group in protection["groups"]] == [1]
    assert shown["daemon"]["capsule_bytes_sent"] > 0
    one = status(daemons[0], "--what-if", "lose=n1")
    assert (one.exit_code, one.stdout) == (0, "job job, step 1 (epoch 1): if n1 is lost, this step survives.\n")
    two = status(daemons[0], "--what-if", "lose=n1,n2", "--json")
    assert two.exit_code == 4 and json.loads(two.stdout)["survives"] is False
    assert status(daemons[0], "--what-if", "lose=n7").exit_code == 2
    assert status(daemons[0], "--what-if", "n1").exit_code == 2
    with Lost(daemons[1]):
        again = status(daemons[0], "--what-if", "lose=n2")
        assert again.exit_code == 4 and "can't be decoded" in again.stdout
        assert "protect DEGRADED" in status(daemons[0]).stdout


def test_degraded_time_ends_with_the_first_whole_version(start):
    daemons = cluster(start, 3)
    held = Held(daemons, 1).end()
    job = held.job
    assert daemons[0].status("job").degraded_s == 0
    before = pb.Manifest()
    before.CopyFrom(job.manifest)
    base = job.version(1)
    for node in job.manifest.nodes[2:]:
        node.id = "another"
    job.counter += 1
    for i, daemon in enumerate(daemons):
        request = pb.DecideRequest(
            manifest=job.manifest, decision=job.decision(base), node_index=i, base_manifest=before
        )  # fmt: skip
        daemon.call("Decide", request)
    now = daemons[0].status("job")
    assert now.degraded and now.degraded_s > 0
    held.trainer = Trainer()
    for rank in range(3):
        held.write(rank, 2)
    until(lambda: job.whole(0) == 2, what="a whole version")
    then = daemons[0].status("job")
    assert not then.degraded and then.degraded_s >= now.degraded_s
    assert daemons[0].status("job").degraded_s == then.degraded_s
    held.end()


def test_a_survey_repeats_no_manifest(start):
    daemons = cluster(start, 3)
    held = Held(daemons, 1).end()
    request = pb.SurveyRequest(job="job", nodes=held.job.manifest.nodes[1:])
    reply = daemons[0].call("Survey", request)
    assert [each.reply.HasField("decision") for each in reply.nodes] == [True, True]
    assert not any(each.reply.HasField("manifest") for each in reply.nodes)
    assert survey(daemons[0].address, "job")[0].plan(()).base == held.job.version(1)
    # Nodes 1 and 2 took part in an attach without the asker. Only one of their replies carries the
    # manifest: the one that comes first.
    newer = held.job
    newer.manifest.every = 7
    newer.manifest.nodes[1].ranks.extend(newer.manifest.nodes[0].ranks)
    del newer.manifest.nodes[0]
    newer.counter += 1
    for i in (1, 2):
        decision = newer.decision(newer.version(1, 1))
        decide = pb.DecideRequest(manifest=newer.manifest, decision=decision, node_index=i - 1)
        newer.daemons[i].call("Decide", decide)
    reply = daemons[0].call("Survey", request)
    assert sorted(each.reply.HasField("manifest") for each in reply.nodes) == [False, True]
    assert not any(each.reply.HasField("base_manifest") for each in reply.nodes)
    job_survey, _ = survey(daemons[0].address, "job")
    assert job_survey.manifest.every == 7 and job_survey.plan(()).base == newer.version(1, 1)


def damage(held: Held, rank: int) -> None:
    path = held.path(rank)
    slot = mapped(path)
    with open(path, "r+b") as file:
        file.seek(slot.header.geometry.data_offset + 5000)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def test_a_damaged_slot_counts_as_lost(start):
    """One node is lost and one slot is damaged: two losses, with f = 2."""
    daemons = cluster(start, 6)
    held = Held(daemons, 2).end()
    spare = start("--node", "spare")
    before = {rank: contents(held.path(rank)) for rank in (1, 2)}
    damage(held, 2)
    with Lost(daemons[1]):
        done = recover(daemons[0], "--yes", "--onto", f"n1={spare.address}")
        found = json.loads(done.stdout)
        assert (done.exit_code, found["outcome"]) == (0, "rebuilt"), done.output
        assert any("rank-2" in line and "damaged" in line for line in found["missing"])
        assert [each["ranks"] for each in found["rebuilt"]] == [[1], [2]]
        assert contents(rebuilt_slot(spare, 1)) == before[1]
        slots = daemons[2].folder.glob("job/rank-2.slot-*")
        assert before[2] in [contents(path) for path in slots if mapped(path).header.state is SlotState.SEALED]


def test_a_damaged_slot_and_a_lost_node_are_too_much_for_f_1(start):
    daemons = cluster(start, 4)
    held = Held(daemons, 1).end()
    spare = start("--node", "spare")
    damage(held, 2)
    with Lost(daemons[1]):
        found = recover(daemons[0], "--yes", "--onto", f"n1={spare.address}")
        document = json.loads(found.stdout)
        assert (found.exit_code, document["outcome"]) == (4, "unrecoverable")
        assert "on node n2 is damaged (rank-2.slot-0)." in " ".join(document["missing"])
    until(lambda: not list(spare.folder.glob("job/*")), what="the spare daemon to forget the job")


def test_a_capsule_that_changes_on_its_way_is_found_where_it_arrives(start):
    """The holder's file is right; what the holder sends is not what the trainer sealed."""
    daemons = cluster(start, 3)
    Held(daemons, 1).end()
    spare = start("--node", "spare")
    (file,) = (path for daemon in daemons for path in daemon.folder.glob("job/capsule-1.*"))
    job, record = capsule_store.decode(file.read_bytes())
    record.capsule = record.capsule[:-1] + bytes([record.capsule[-1] ^ 1])
    with open(file, "r+b") as opened:  # in place: the daemon keeps the file open
        opened.write(capsule_store.encode(job, record))
    with Lost(daemons[1]):
        with (
            pytest.raises(DamagedSlot, match="rank 1, step 1 has a wrong digest"),
            MemorySource(daemons[0].address, "job").open(),
        ):
            pass
        found = recover(daemons[0], "--yes", "--onto", f"n1={spare.address}")
        document = json.loads(found.stdout)
        assert (found.exit_code, document["outcome"]) == (4, "unrecoverable"), found.output
        assert "is damaged (capsule-1)." in " ".join(document["missing"])
    assert "the capsule of rank 1, step 1 has a wrong digest" in spare.log.read_text()


class GrownInlineLeaf(Held):
    """A job whose inline leaves have grown since attach foresaw them."""

    def inline_leaf(self, rank: int) -> bytes:
        return super().inline_leaf(rank) + bytes(4)


def test_a_slot_whose_leaves_nobody_foresaw_is_given_up_like_a_damaged_one(start):
    """A table made for it would have the foreseen sizes, and no restart could load the slot."""
    daemons = cluster(start, 3)
    GrownInlineLeaf(daemons, 1).end()
    spare = start("--node", "spare")
    with Lost(daemons[1]):
        found = recover(daemons[0], "--yes", "--onto", f"n1={spare.address}")
        document = json.loads(found.stdout)
        assert (found.exit_code, document["outcome"]) == (4, "unrecoverable"), found.output
        assert "is damaged (capsule-1)." in " ".join(document["missing"])
    assert "running_mean has 24 bytes in the capsule of rank 1" in spare.log.read_text()


def test_an_older_version_without_its_capsules_is_not_rebuilt(start):
    daemons = cluster(start, 4)
    held = Held(daemons, 1, steps=(1, 2)).end()
    spare = start("--node", "spare")
    damage_path = held.path(2, step=2)
    with open(damage_path, "r+b") as file:
        file.truncate(100)
    before = contents(held.path(1, step=1))
    with Lost(daemons[1]):
        found = recover(daemons[0], "--yes", "--onto", f"n1={spare.address}")
        document = json.loads(found.stdout)
    # the capsules of step 1 were removed when step 2 became whole
    assert before and (found.exit_code, document["step"]) == (4, None)


def test_a_rebuild_is_refused_while_trainers_live(start):
    daemons = cluster(start, 4)
    held = Held(daemons, 1)
    found = recover(daemons[0], "--yes")
    assert found.exit_code == 1 and "rank 0" in found.stderr and "job job still has 4 living trainers" in found.stderr
    job_survey, _ = survey(daemons[0].address, "job")
    plan = job_survey.plan(())
    del plan.sources[3]
    plan.capsules[3] = next(copy for copy in job_survey.copies if copy.rank == 3)
    request = rebuild_request(job_survey, plan, [3], {})
    with refused(Code.FAILED_PRECONDITION, "trains rank 0 of job job"):
        daemons[0].call("Rebuild", request)
    request.onto.CopyFrom(pb.Node(name="x", addresses=[daemons[1].address]))
    with refused(Code.FAILED_PRECONDITION, "trains rank 0 of job job"):
        daemons[0].call("Rebuild", request)
    held.end()


def test_another_silent_daemon_is_named_and_not_the_asked_one(start):
    """Of the asked daemon's own silence the command line says that no daemon answers."""
    daemons = cluster(start, 4)
    Held(daemons, 1).end()
    with Lost(daemons[0]):
        for method, request in (("PersistJob", pb.PersistJobRequest(job="job")), ("Hold", pb.HoldRequest(job="job"))):
            with refused(Code.FAILED_PRECONDITION, "node n0 can't be reached: "):
                daemons[1].call(method, request)
        done = recover(daemons[1], "--yes", "--onto", "n0=127.0.0.1:1")
    assert done.exit_code == 1 and "the daemon at 127.0.0.1:1 can't be reached" in done.stderr, done.output
    assert "correct --onto" in json.loads(done.stderr)["error"]["hint"]


def request_for(held: Held, rank: int, erased: Sequence[tuple[str, str, object]] = ()) -> pb.RebuildRequest:
    job_survey, _ = survey(held.job.daemons[0].address, "job")
    return rebuild_request(job_survey, job_survey.plan(erased), [rank], {})


def register_agent(daemon: DaemonProcess, launch_token: bytes) -> None:
    """Gives a daemon the launch's token, as an agent of its node does."""
    ident = daemon.call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL)).node_id
    request = pb.AgentBeatRequest(
        job="job", node_id=ident, launch="launch", round=1, pid=os.getpid(), token=launch_token,
        nodes=[pb.Node(name="spare", id=ident)],
    )  # fmt: skip
    daemon.call("AgentBeat", request)


def test_which_callers_may_rebuild_over_tcp(start):
    daemons = cluster(start, 4, "--listen", "127.0.0.1:0")
    held = Held(daemons, 1).end()
    spare, deaf = start("--listen", "127.0.0.1:0"), start()
    (address,) = spare.call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL)).addresses
    launch_token = b"l" * 32
    with Lost(daemons[3]):
        request = request_for(held, 3)
        # a daemon that holds the job wants its token
        for token in (None, b"x" * 32, CERTIFIED):
            with refused(Code.UNAUTHENTICATED):
                tcp_call(held.job.hellos[0].addresses[0], "Rebuild", request, token)
        # a daemon without the job can't know the job's token, and wants that of its own agent
        for token in (None, b"x" * 32, CERTIFIED, held.job.manifest.token, launch_token):
            with refused(Code.UNAUTHENTICATED, "reft-cli recover"):
                tcp_call(address, "Rebuild", request, token)
        assert not spare.call("Status", pb.StatusRequest()).jobs
        register_agent(spare, launch_token)
        for token in (held.job.manifest.token, CERTIFIED):
            with refused(Code.UNAUTHENTICATED):
                tcp_call(address, "Rebuild", request, token)
        assert len(tcp_call(address, "Rebuild", request, launch_token).slots) == 1
        # now it holds the job
        for token in (None, launch_token):
            with refused(Code.UNAUTHENTICATED):
                tcp_call(address, "Rebuild", request, token)
        assert len(tcp_call(address, "Rebuild", request, held.job.manifest.token).slots) == 1
        # the unix socket needs no proof
        assert len(deaf.call("Rebuild", request).slots) == 1
        other = pb.RebuildRequest()
        other.CopyFrom(request)
        other.manifest.token = b"y" * 32
        with refused(Code.INVALID_ARGUMENT, "another job of the name"):
            deaf.call("Rebuild", other)


def test_recover_onto_a_daemon_of_the_same_launch(start):
    daemons = cluster(start, 3, "--listen", "127.0.0.1:0")
    held = Held(daemons, 1).end()
    before = contents(held.path(1))
    spare = start("--listen", "127.0.0.1:0")
    (address,) = spare.call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL)).addresses
    with Lost(daemons[1]):
        done = recover(daemons[0], "--yes", "--onto", f"n1={address}")
        assert done.exit_code == 1 and "takes no job from this node" in done.output, done.output
        assert "run reft-cli recover job on that node" in done.output
        for daemon in (daemons[0], spare):
            register_agent(daemon, b"l" * 32)
        done = recover(daemons[0], "--yes", "--onto", f"n1={address}")
        assert done.exit_code == 0 and json.loads(done.stdout)["outcome"] == "rebuilt", done.output
        assert contents(rebuilt_slot(spare, 1)) == before


def test_addresses_of_unix_sockets_do_not_count_over_tcp(start):
    daemons = cluster(start, 4, "--listen", "127.0.0.1:0")
    held = Held(daemons, 1).end()
    address, token = held.job.hellos[0].addresses[0], held.job.manifest.token
    with Lost(daemons[3]):
        request = request_for(held, 3)
        for nodes in (request.nodes, request.manifest.nodes):
            nodes[1].addresses.append("unix:/tmp/any.sock")
            with refused(Code.INVALID_ARGUMENT, "unix:/tmp/any.sock came over TCP"):
                tcp_call(address, "Rebuild", request, token)
            nodes[1].addresses.pop()
        assert len(tcp_call(address, "Rebuild", request, token).slots) == 1


@pytest.mark.parametrize("status", [Code.OK, Code.NOT_FOUND, Code.DATA_LOSS], ids=lambda status: status.name)
def test_a_rogue_server_on_the_lost_nodes_port_steers_no_recovery(start, status):
    daemons = cluster(start, 3, "--listen", "127.0.0.1:0")
    held = Held(daemons, 1).end()
    before, hello = contents(held.path(1)), held.job.hellos[1]
    spare = start("--node", "spare")
    newer = pb.Decision(epoch=messages.epoch_to(epoch_of(9)))
    rival = pb.InventoryReply(manifest=held.job.manifest, decision=newer, node_id=hello.node_id, had_whole=True)
    server = ProvingServer(hello.node_id, None, status, rival)
    with Lost(daemons[1]), rogue(server, hello.addresses[0]):
        done = recover(daemons[0], "--yes", "--onto", f"n1={spare.address}")
        assert done.exit_code == 0 and json.loads(done.stdout)["outcome"] == "rebuilt", done.output
        assert contents(rebuilt_slot(spare, 1)) == before
    assert server.received and repr(held.job.manifest.token)[2:-1] not in repr(server.received)


def test_recover_on_the_replacement_node_uses_its_own_daemon(start):
    daemons = cluster(start, 4)
    held = Held(daemons, 1).end()
    before = contents(held.path(2))
    spare = start("--node", "spare")
    with Lost(daemons[2]):
        bare = recover(daemons[0], "--yes")
        assert bare.exit_code == 2 and "node n2 has no replacement" in bare.stderr
        wrong = recover(daemons[0], "--onto", f"nowhere={spare.address}")
        assert wrong.exit_code == 2 and "no such node" in wrong.stderr
        done = recover(daemons[0], "--yes", local=spare.address)
        assert json.loads(done.stdout)["outcome"] == "rebuilt", done.output
        assert contents(rebuilt_slot(spare, 2)) == before
        # the record is kept as after an attach: a restarted daemon offers the slot
        spare.kill()
        spare.start()
        reply = spare.call("Inventory", pb.InventoryRequest(job="job"))
        assert [(s.rank, s.state, s.version.step) for s in reply.slots] == [(2, pb.SEALED, 1)]
        assert reply.had_whole and messages.decision_from(reply.decision).epoch == held.job.version(1).epoch


def test_decoded_data_is_compared_with_the_saved_digests(start):
    daemons = cluster(start, 4)
    held = Held(daemons, 1).end()
    spare = start("--node", "spare")
    # This slot's digests match its wrong bytes. Only the digests of the lost rank show the damage.
    path = held.path(2)
    pages = np.memmap(path, np.uint8, "r+")
    slot = SlotMap(pages)
    slot.data[100] ^= 1
    slot.digests[0] = chunk_digest(slot.chunk(0))
    pages.flush()
    with Lost(daemons[1]):
        done = recover(daemons[0], "--yes", "--onto", f"n1={spare.address}")
        assert done.exit_code == 1
        assert "the decoded data of rank 1" in done.stderr
        assert "in lane 0, made from rank 0, rank 2, rank 3 on n0, n2, n3, twice." in done.stderr
        assert not list(spare.folder.glob("job/*"))
        assert spare.call("Status", pb.StatusRequest()).held_bytes == 0


def test_invalid_rebuild_requests_are_refused(start):
    daemons = cluster(start, 4)
    held = Held(daemons, 1).end()
    spare = start("--node", "spare")
    with Lost(daemons[3]):
        good = request_for(held, 3)

        def changed(**changes: object) -> pb.RebuildRequest:
            request = pb.RebuildRequest()
            request.CopyFrom(good)
            request.MergeFrom(pb.RebuildRequest(**changes))
            return request

        twice = changed(lost=[pb.LostRank(rank=0, keeper=0)])
        nobody = changed(lost=[pb.LostRank(rank=9, keeper=0)])
        far = changed(slots=[pb.SlotSource(rank=3, node=99)])
        foreign = changed(version=pb.Version(epoch=pb.Epoch(counter=7, ident=bytes(16))))
        few = changed()
        del few.slots[1:]
        for request in (twice, nobody, far, foreign, few, pb.RebuildRequest()):
            with refused(Code.INVALID_ARGUMENT):
                spare.call("Rebuild", request)
        stale = changed(slots=[])
        stale.slots[0].slot = "rank-0.slot-7"
        reply = spare.call("Rebuild", stale)
        assert [(each.slot, each.node) for each in reply.damaged] == [
            ("rank-0.slot-7", stale.nodes[stale.slots[0].node].id)
        ]
        assert not spare.call("Status", pb.StatusRequest()).jobs


def test_an_attach_during_a_rebuild_leases_no_unfinished_slot(tmp_path):
    """The trainer would write a slot that the rebuild frees once it notices the attach."""

    async def run() -> None:
        registry = registry_of(Arena(tmp_path, 0))
        lost = _LostSlot(0, pb.CapsuleRecord(), b"table", Geometry(PAGE, CHUNK, CHUNK))
        first, second = decide_request(1), decide_request(2)
        first.manifest.token = second.manifest.token = bytes(32)
        await registry.decide(first)
        job = registry.get("job")
        version = messages.version_to(Version(epoch_of(1), 3))
        rebuild = Rebuild(
            registry, pb.RebuildRequest(manifest=first.manifest, decision=first.decision, version=version)
        )
        slots: dict[int, SlotFile] = {}
        await rebuild._make_slot(job, lost, slots)
        await registry.decide(second)
        leased = await leasing.lease(job, lease_request(2), caller_process(os.getpid()))
        rebuild._drop_unsealed(job, slots.values(), False)
        assert {slot.name for slot in leased} == set(job.slots.all) and {slot.backing for slot in leased} == {"tmpfs"}
        assert registry.arena.held_bytes == job.held_bytes
        await registry.close(purge=True)

    asyncio.run(run())


def test_a_rebuild_frees_what_a_killed_daemon_left_of_an_earlier_one(tmp_path):
    """The next daemon takes the unfinished slot over. Each further try took one more."""

    async def run() -> None:
        lost = _LostSlot(0, pb.CapsuleRecord(), b"table", Geometry(PAGE, CHUNK, CHUNK))
        request = decide_request(1)
        request.manifest.token = bytes(32)
        version = messages.version_to(Version(epoch_of(1), 3))
        held_bytes = []
        for _ in range(3):
            registry = registry_of(Arena(tmp_path, 0))
            registry.adopt()
            if not registry.jobs:
                await registry.decide(request)
            job = registry.get("job")
            rebuild = Rebuild(
                registry, pb.RebuildRequest(manifest=request.manifest, decision=request.decision, version=version)
            )
            await rebuild._make_slot(job, lost, {})
            assert registry.arena.held_bytes == job.held_bytes
            held_bytes.append(job.held_bytes)
            await registry.close(purge=False)  # the slot is still being written, as after a SIGKILL
            registry.arena.close()
        assert held_bytes == [held_bytes[0]] * 3

    asyncio.run(run())
