"""`reft-cli recover`: plans a recovery, and with --yes rebuilds the slots of lost ranks.

`reft.core.recovery` makes the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reft.cli.ask import ask, job_status, local_address
from reft.cli.recover_view import RecoveryView, recovery_view, with_targets
from reft.cli.status_view import remedy_of
from reft.cli.survey import survey
from reft.core.commit.version import Version
from reft.core.recovery.recovery import RecoveryPlan
from reft.core.status.health import Health
from reft.core.text import counted
from reft.errors import AttachError, ConfigError, DaemonUnavailable
from reft.wire import daemon_launcher, rpc
from reft.wire.inventory import JobSurvey
from reft.wire.rebuild_request import rebuild_request
from reft.wire.v1 import daemon_pb2 as pb

TRIES_MAX = 16  # a try fails if a slot is found damaged, or if another slot is lost meanwhile
REBUILD_DEADLINE_S = 3700.0  # a little longer than the daemon that forwards the request waits


@dataclass
class RecoverCommand:
    """One run of `reft-cli recover`.

    Args:
        address: of a living daemon that holds the job.
        job: the job's name.
        onto: lost node, by name or id → address of the daemon that replaces the node.
        local: address of this node's own daemon if `address` is another daemon. The local daemon
            may be a replacement.
    """

    address: str
    job: str
    onto: Mapping[str, str]
    local: str = ""
    erased: set[tuple[str, str, Version]] = field(default_factory=set)
    rebuilt: list[dict[str, Any]] = field(default_factory=list)
    _job_survey: JobSurvey | None = None
    _addresses: dict[str, list[str]] = field(
        default_factory=dict
    )  # node id → addresses, for nodes that no manifest names
    _local: pb.HelloReply | None = None

    def look(self) -> tuple[RecoveryView, RecoveryPlan]:
        """Returns a view of the current holdings, and the plan.

        Raises:
            AttachError: trainers of the job live, or the job has two histories.
            ConfigError: `onto` names an unknown node.
            ReftError: the daemon does not hold the job, or does not answer.
        """
        status = job_status(self.address, self.job)[0]
        living = sorted(rank.rank for rank in status.ranks if rank.alive)
        if living:
            raise AttachError(
                f"job {self.job} still has {counted(len(living), 'living trainer')} (first: rank {living[0]}). "
                "A job can't be recovered while it trains.",
                "end the job first, or just restart it: a restart finds lost nodes by itself",
            )
        job_survey, self._addresses = survey(self.address, self.job, self.onto.values(), self._ask_local())
        job_survey.inventory.refuse_rivals(self.job)
        self._job_survey = job_survey
        if self._local is not None:
            self._addresses[self._local.node_id] = list(self._local.addresses)
        plan = job_survey.rebuild_plan(self.erased)
        view = recovery_view(self.job, job_survey, plan, self.erased)
        if view.remedy:
            view = replace(view, remedy=remedy_of(status, job_survey, job_survey.holdings(self.job, self.erased, plan)))
        known = {*job_survey.names.values(), *job_survey.nodes, *self._short_names(job_survey)}
        if unknown := sorted(set(self.onto) - known):
            raise ConfigError(
                f"--onto {unknown[0]}: the job has no such node.", f"use one of {', '.join(job_survey.names.values())}"
            )
        return with_targets(view, {node.ident: self._target(job_survey, node.ident) for node in view.lost}), plan

    def rebuild(self, say: Callable[[str], None]) -> RecoveryView:
        """Rebuilds the lost slots, node by node.

        Makes a new plan when a source turns out to be damaged.

        Raises:
            ConfigError: a lost node has no replacement.
            ReftError: a daemon failed.
        """
        for _ in range(TRIES_MAX):
            view, plan = self.look()
            if view.outcome != "recoverable":
                return self._final_view(view)
            unreplaced = [node.node for node in view.lost if not node.onto]
            if unreplaced:
                raise ConfigError(
                    f"node {unreplaced[0]} has no replacement.",
                    f"add --onto {unreplaced[0]}=HOST:PORT, the address of a running reft-daemon",
                )
            for node in view.lost:
                say(f"rebuilding {node.node} on {node.onto} …")
                if not self._rebuild(plan, node.node, node.ranks, node.onto):
                    break
        raise AttachError(f"slots are still missing after {TRIES_MAX} tries.", "read the logs of the daemons")

    def _rebuild(self, plan: RecoveryPlan, node: str, ranks: Sequence[int], onto: str) -> bool:
        """Returns whether the slots were rebuilt; False: a source is damaged, so plan again."""
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
                f"the daemon at {onto} rebuilt {len(reply.slots)} of {counted(len(ranks), 'slot')}.",
                "read the log of that daemon",
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

    def _final_view(self, view: RecoveryView) -> RecoveryView:
        if view.outcome != "whole" or not self.rebuilt:
            return view
        reason = (
            f"all slots of {view.version} are held again. Start the job on the replacement nodes to continue. "
            "Until then ask reft-cli there: the other nodes do not know these slots."
        )
        return RecoveryView(view.job, "rebuilt", Health.OK, reason, view.version, view.silent, (), view.newer)

    def _ask_local(self) -> dict[str, pb.InventoryReply]:
        """Returns the inventory of this node's own daemon if `address` is another daemon."""
        if not self.local:
            return {}
        try:
            self._local = daemon_launcher.hello(self.local)
            reply = ask(self.local, "Inventory", pb.InventoryRequest(job=self.job))
        except DaemonUnavailable:
            return {}
        return {reply.node_id: reply} if reply.HasField("decision") else {}

    def _short_names(self, job_survey: JobSurvey) -> set[str]:
        return {node.name for node in job_survey.nodes.values()}

    def _target(self, job_survey: JobSurvey, ident: str) -> str:
        """Returns the address where a lost node is rebuilt; empty if none is named."""
        node = job_survey.nodes[ident]
        for name in (ident, job_survey.names[ident], node.name):
            if name in self.onto:
                return self.onto[name]
        if ident in job_survey.replies and job_survey.replies[ident].HasField("decision") and node.addresses:
            return node.addresses[0]  # the daemon lives and only lacks the slots
        members = {node.id for manifest in job_survey.manifests.values() for node in manifest.nodes}
        return self.local if self._local is not None and self._local.node_id not in members else ""


def replacement_here(daemon: str | None) -> str:
    """Returns the address of this node's own daemon if `daemon` names another one; else empty."""
    own = local_address(None)
    return own if daemon and own != local_address(daemon) else ""


def pairs_of(arguments: Iterable[str]) -> dict[str, str]:
    """Returns node → address, from arguments NODE=ADDR.

    Raises:
        ConfigError: an argument is not NODE=ADDR, or a node is named twice.
    """
    address_of: dict[str, str] = {}
    for argument in arguments:
        node, _, address = argument.partition("=")
        if not node or not address or node in address_of:
            raise ConfigError(
                f"--onto {argument!r} has no node or no address, or names a node twice.",
                "--onto NODE=HOST:PORT or --onto NODE=unix:PATH",
            )
        address_of[node] = rpc.check_address(address)
    return address_of
