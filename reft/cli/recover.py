"""`reft-cli recover`: looks, plans, and with --yes has the slots of lost ranks made again. The plan is `reft.core.recovery`'s."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reft.cli.ask import ask, local_address
from reft.cli.recover_view import RecoveryView, recovery_view, with_targets
from reft.cli.survey import survey
from reft.core.commit.version import Version
from reft.core.recovery.recovery import RecoveryPlan
from reft.core.status.health import Health
from reft.core.text import counted
from reft.errors import AttachError, ConfigError, DaemonUnavailable
from reft.wire import messages
from reft.wire.inventory import JobSurvey
from reft.wire.rebuild_request import rebuild_request
from reft.wire.v1 import daemon_pb2 as pb

TRIES_MAX = 16  # each but the last finds another slot damaged, or something lost meanwhile
REBUILD_DEADLINE_S = 3700.0  # a little longer than a daemon that passes it on waits


@dataclass
class RecoverCommand:
    """One run of the command.

    Args:
        address: of a living daemon that holds the job.
        job: its name.
        onto: lost node, by name or id → address of its replacement's daemon.
        local: address of this node's own daemon, if another one was named as `address`; it may be the replacement.
    """

    address: str
    job: str
    onto: Mapping[str, str]
    local: str = ""
    erased: set[tuple[str, str, Version]] = field(default_factory=set)
    rebuilt: list[dict[str, Any]] = field(default_factory=list)
    _job_survey: JobSurvey | None = None
    _addresses: dict[str, list[str]] = field(default_factory=dict)  # of nodes that no manifest names, by id
    _local: pb.HelloReply | None = None

    def look(self) -> tuple[RecoveryView, RecoveryPlan]:
        """What is held now, and what may be done.

        Raises:
            AttachError: trainers of the job live, or it has two histories.
            ReftError: the daemon does not hold the job, or does not answer.
        """
        status = ask(self.address, "Status", pb.StatusRequest(job=self.job, deep=True)).jobs[0]
        living = sorted(rank.rank for rank in status.ranks if rank.alive)
        if living:
            raise AttachError(
                f"job {self.job} has {counted(len(living), 'living trainer')}, the first is rank {living[0]}: nothing is to be "
                "recovered while it trains.",
                "end it first; a restart of the job finds lost nodes by itself",
            )
        job_survey, self._addresses = survey(self.address, self.job, self.onto.values(), self._ask_local())
        job_survey.inventory.refuse_rivals(self.job)
        self._job_survey = job_survey
        if self._local is not None:
            self._addresses[self._local.node_id] = list(self._local.addresses)
        plan = job_survey.plan(self.erased)
        view = recovery_view(self.job, job_survey, plan, self.erased)
        if unknown := sorted(
            set(self.onto) - {*job_survey.names.values(), *job_survey.nodes, *self._plain(job_survey)}
        ):
            raise ConfigError(
                f"--onto {unknown[0]}: no such node in the job.", f"one of {', '.join(job_survey.names.values())}"
            )
        return with_targets(view, {node.ident: self._target(job_survey, node.ident) for node in view.lost}), plan

    def rebuild(self, say: Callable[[str], None]) -> RecoveryView:
        """Makes what is lost again, node by node; plans anew when a source turns out to be damaged.

        Raises:
            ConfigError: a lost node has no replacement.
            ReftError: a daemon failed.
        """
        for _ in range(TRIES_MAX):
            view, plan = self.look()
            if view.outcome != "recoverable":
                return self._ended(view)
            bare = [node.node for node in view.lost if not node.onto]
            if bare:
                raise ConfigError(f"node {bare[0]} has no replacement.", f"--onto {bare[0]}=ADDRESS of a daemon")
            for node in view.lost:
                say(f"rebuilding {node.node} on {node.onto} …")
                if not self._rebuild(plan, node.node, node.ranks, node.onto):
                    break
        raise AttachError(f"after {TRIES_MAX} tries slots are still missing.", "look at the logs of the daemons")

    def _rebuild(self, plan: RecoveryPlan, node: str, ranks: Sequence[int], onto: str) -> bool:
        """Whether it was done; if not, something is damaged, and another plan is needed."""
        assert self._job_survey is not None and plan.base is not None, "a rebuild without a plan"
        request = rebuild_request(self._job_survey, plan, ranks, self._addresses)
        address = onto
        if onto != self.local:
            request.onto.CopyFrom(pb.Node(name=onto, addresses=[onto]))
            address = self.address
        began = time.monotonic()
        reply = ask(address, "Rebuild", request, REBUILD_DEADLINE_S)
        if reply.damaged:
            self.erased |= {(each.node, each.slot, plan.base) for each in reply.damaged}
            return False
        if len(reply.slots) != len(ranks):
            raise AttachError(
                f"the daemon at {onto} made {len(reply.slots)} of {counted(len(ranks), 'slot')}.", "look at its log"
            )
        self.rebuilt.append(
            {
                "node": node,
                "onto": onto,
                "ranks": list(ranks),
                "step": plan.base.step,
                "slot_bytes": sum(slot.data_bytes for slot in reply.slots),
                "read_bytes": reply.read_bytes,
                "seconds": round(time.monotonic() - began, 3),
            }
        )
        return True

    def _ended(self, view: RecoveryView) -> RecoveryView:
        if view.outcome != "whole" or not self.rebuilt:
            return view
        reason = f"{view.version} is held whole again: start the job on the replacement and it goes on from there."
        return RecoveryView(view.job, "rebuilt", Health.OK, reason, view.version, view.silent, (), view.newer)

    def _ask_local(self) -> dict[str, pb.InventoryReply]:
        """What this node's own daemon holds, if it is not the one that is asked for all."""
        if not self.local:
            return {}
        try:
            self._local = ask(self.local, "Hello", pb.HelloRequest(protocol=messages.PROTOCOL))
            reply = ask(self.local, "Inventory", pb.InventoryRequest(job=self.job))
        except DaemonUnavailable:
            return {}
        return {reply.node_id: reply} if reply.HasField("decision") else {}

    def _plain(self, job_survey: JobSurvey) -> set[str]:
        return {node.name for node in job_survey.nodes.values()}

    def _target(self, job_survey: JobSurvey, ident: str) -> str:
        """The address at which a lost node's slots are to be made again; empty if nobody said."""
        node = job_survey.nodes[ident]
        for name in (ident, job_survey.names[ident], node.name):
            if name in self.onto:
                return self.onto[name]
        if ident in job_survey.replies and job_survey.replies[ident].HasField("decision") and node.addresses:
            return node.addresses[0]  # it lives; only its slots are gone
        members = {node.id for manifest in job_survey.manifests.values() for node in manifest.nodes}
        return self.local if self._local is not None and self._local.node_id not in members else ""


def replacement_here(daemon: str | None) -> str:
    """This node's own daemon, if another one was named; else nothing."""
    own = local_address(None)
    return own if daemon and own != local_address(daemon) else ""
