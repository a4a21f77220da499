"""The results of attach's steps for a job on a few nodes, as data: without any daemon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from reft.client.attach.arguments import AttachArguments, AttachContext
from reft.client.attach.introduce import Description, Introduction, NodeDaemon, manifest_of
from reft.client.attach.local_state import LocalState
from reft.client.attach.plan import AttachPlan, make_plan
from reft.client.attach.rank_table import (
    AgreedSettings,
    IdentityFacts,
    JobSecrets,
    LayoutFacts,
    NodeIdentity,
    ProcessFacts,
    RankInfo,
    RankTable,
)
from reft.client.link.rank_group import RankGroup
from reft.client.state.tensors import leaf_of
from reft.config import Config, Launch
from reft.core.commit.version import Epoch, Version
from reft.core.layout.layout import Leaf
from reft.core.recovery.recovery import RecoveryPlan
from reft.failpoints import Failpoints
from reft.wire import local_socket, messages, rpc
from reft.wire.inventory import JobSurvey
from reft.wire.manifest import division_of, domains_of, inline_bytes_max, layouts_of, table_to
from reft.wire.process import Process
from reft.wire.v1 import daemon_pb2 as pb

REQUEST = AttachArguments(None, (), None, {}, 1, "arc", 1)
IDENTITY = IdentityFacts(job="job", run_id="", slurm="", script="s.py", user=0, launch="l", unnamed="")
SECRETS = JobSecrets(bytes(range(80)), b"t" * 32)


def context(rank: int = 0, launch: Launch | None = None, **settings: Any) -> AttachContext:
    """Returns the context of a rank that is alone in its group."""
    rank_group = RankGroup(1.0)
    rank_group.rank = rank
    return AttachContext(
        Config(**settings), launch or Launch(0, 1, "", ""), rank_group, REQUEST, Failpoints(), rpc.DaemonCalls()
    )


def leaves(width: int = 3000) -> list[Leaf]:
    return [leaf_of("model.0.w", torch.empty(width, 2), False), leaf_of("model.0.b", torch.empty(4000), False)]


def state(own: Sequence[Leaf]) -> LocalState:
    """Returns the state of a rank with these leaves, and without tensors."""
    tracked = SimpleNamespace(parameters=tuple)
    host = SimpleNamespace(check_size=lambda names: None)
    tensor_index = SimpleNamespace(tensors={}, names={})
    return LocalState(tracked, host, tensor_index, own)  # type: ignore[arg-type]


def daemon(node: str = "a") -> NodeDaemon:
    """Returns a daemon that nobody can call."""
    hello = pb.HelloReply(node=f"name-{node}", node_id=node, addresses=[f"{node}:1"], domain="", local_socket="/s")
    return NodeDaemon("unix:/s", hello, local_socket.CallerProcess(Process(70, 1), 0), rpc.DaemonCalls(), 1.0)


def introduction(nodes: str = "ab", rank: int = 0, width: int = 3000, job: str = "job") -> Introduction:
    """Returns the introduction of a job with one rank for each letter, the name of its node."""
    own = state(leaves(width))
    info = RankInfo(
        node=NodeIdentity("", "", (), ""),
        process=ProcessFacts(70, 1, "1"),
        identity=replace(IDENTITY, job=job),
        layout=LayoutFacts.of(own.predicted, own.symbolic),
        agreed=AgreedSettings.of(REQUEST, Config()),
    )
    infos = [
        replace(
            info,
            node=NodeIdentity(f"name-{node}", node, (f"{node}:1",), ""),
            process=replace(info.process, pid=70 + each),
            secrets=None if each else SECRETS,
        )
        for each, node in enumerate(nodes)
    ]
    ranks = RankTable(infos)
    return Introduction(rank, own, daemon(nodes[rank]), ranks, ranks.job(), ranks.nodes())


def description(introduced: Introduction) -> Description:
    table = table_to(introduced.state.symbolic.table)
    published = [table if introduced.ranks.describes(rank) else b"" for rank in range(len(introduced.ranks.infos))]
    manifest = manifest_of(context(), introduced, published)
    return Description(manifest, division_of(layouts_of(manifest), inline_bytes_max(domains_of(manifest)), ()))


def begun(nodes: str = "ab", ident: bytes = b"e" * 16, mismatched: Sequence[str] = ()) -> AttachPlan:
    """Returns the plan of an attach of a new job."""
    described = description(introduction(nodes))
    described.manifest.token, described.manifest.job_mark = b"first token", b"first mark"
    return make_plan(described, JobSurvey({}), RecoveryPlan(None), mismatched, ident)


def sealed(rank: int, step: int, epoch: Epoch) -> pb.SlotHeader:
    version = messages.version_to(Version(epoch, step))
    return pb.SlotHeader(rank=rank, slot=f"rank-{rank}.slot-{step}", state=pb.SEALED, version=version)


def reply(
    node: str,
    plan: AttachPlan | None = None,
    slots: Sequence[pb.SlotHeader] = (),
    capsules: Sequence[tuple[int, int]] = (),
) -> pb.InventoryReply:
    """Returns the reply of a node's daemon.

    Args:
        node: id of the node.
        plan: the attach that the daemon knows; None: the daemon does not know the job.
        slots: the headers of its slots.
        capsules: rank and step of the capsules that it keeps for ranks of other nodes.
    """
    if plan is None:
        return pb.InventoryReply(node=f"name-{node}", node_id=node)
    decision = messages.decision_to(plan.decision)
    copies = [
        pb.CapsuleHeader(rank=rank, version=messages.version_to(Version(plan.decision.epoch, step)))
        for rank, step in capsules
    ]
    return pb.InventoryReply(
        node=f"name-{node}", node_id=node, manifest=plan.manifest, decision=decision, slots=slots, capsules=copies,
        had_whole=True, trained_s=60.0, failed=True,
    )  # fmt: skip


def survey_of(plan: AttachPlan, steps: dict[str, Sequence[int]], **capsules: Sequence[tuple[int, int]]) -> JobSurvey:
    """Returns a survey of nodes that hold slots of these steps, each of its own rank.

    Args:
        plan: the attach that wrote the slots.
        steps: node → the steps that its slots hold.
        capsules: node → rank and step of the capsules that it keeps.
    """
    rank_of = {node.id: node.ranks[0] for node in plan.manifest.nodes}
    epoch = plan.decision.epoch
    return JobSurvey({
        node: reply(node, plan, [sealed(rank_of[node], step, epoch) for step in each], capsules.get(node, ()))
        for node, each in steps.items()
    })  # fmt: skip
