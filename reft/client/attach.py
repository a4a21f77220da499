"""Attach: from the user's objects to a session, in steps that all ranks take together.

    introduce   find or start this node's daemon; every rank learns every rank's facts
    inventory   one rank a node: orphans are ended, headers of all held slots
    plan        the same pure function on every rank: base version, or a fresh start
    decide      one rank a node: the decision record, before anyone loads
    load        every rank: register as trainer, slot ─► live tensors      (a damaged slot: back to inventory, without it)
    lease       every rank: slots for the snapshots to come, every page touched
    begin       host state, random generators last

Each step ends in an exchange: an error of one rank is raised on all, within a deadline, and nobody hangs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from torch import nn

from reft.client import host_state, restore, starter
from reft.client.copier import Copier, CpuCopier, copy_cpus
from reft.client.exchange import Exchange, bytes_of, text_of
from reft.client.fencing import die_with_parent, launch_mark
from reft.client.host_state import HostState
from reft.client.leasing import ALLOCATION_BYTES_PER_S, Leaser
from reft.client.predict import predicted_leaves
from reft.client.reporter import Reporter
from reft.client.session import Session
from reft.client.snapshots import Snapshots
from reft.client.state import Subjects, check_owners
from reft.config import Config, Launch
from reft.core import recovery
from reft.core.identity import Job, identify
from reft.core.layout import Layout, pack
from reft.errors import AttachError, ConfigError, ReftError, RestoreError
from reft.failpoints import Failpoints
from reft.wire import capsule, messages, rpc
from reft.wire.slot_format import SlotMap
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc

log = logging.getLogger("reft")


def attach(
    model: Any, optimizer: Any, schedule: Any, *, state: Mapping[str, Any] | None, tolerate: int | None, protect: str,
    every: int | None, slots: int | None, job: str | None, daemon: str | None, config: Config | None,
) -> Session:  # fmt: skip
    """See `reft.attach`."""
    arguments = {"job": job, "daemon": daemon, "slots": slots}
    given: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
    settings = replace(config, **given) if config else Config.load(**given)
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if settings.mode == "off":
        say("switched off (REFT_MODE=off): no snapshots are taken.")
        return Session(None, optimizers, step=0, restored_from=None, counts_calls=False, every=1,
                       seal_deadline_s=0, is_protected=False)  # fmt: skip
    exchange = Exchange(settings.attach_deadline_s)
    try:
        launch = Launch.load()
        request = Request(
            model, optimizers, schedule, dict(state or {}), tolerate, protect, 1 if every is None else every
        )
        return Attachment(settings, launch, exchange, request).run()
    finally:
        exchange.close()


def say(text: str) -> None:
    """One line for the person who started the job."""
    print(f"[reft] {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Request:
    """What the user passed, and what it must be."""

    model: Any
    optimizers: Sequence[Any]
    schedule: Any
    state: Mapping[str, Any]
    tolerate: int | None
    protect: str
    every: int

    def subjects(self) -> Subjects:
        """Models and optimizers, checked.

        Raises:
            ConfigError: something is of the wrong kind.
        """
        models = list(self.model) if isinstance(self.model, (list, tuple, nn.ModuleList)) else [self.model]
        for value in models:
            if not isinstance(value, nn.Module):
                raise ConfigError(f"model is a {type(value).__name__}; an nn.Module is expected.")
        for value in self.optimizers:
            if not isinstance(value, torch.optim.Optimizer):
                raise ConfigError(f"optimizer is a {type(value).__name__}; a torch.optim.Optimizer is expected.")
        if self.every < 1:
            raise ConfigError(f"every is {self.every}; it must be at least 1.")
        if self.protect not in ("auto", "none"):
            raise ConfigError(
                f"protect={self.protect!r} is not in this version, which survives lost processes only.",
                "protect='auto'",
            )
        modules = {f"model.{i}": value for i, value in enumerate(models)}
        check_owners(models, self.optimizers)
        modules |= {f"state.{name}": value for name, value in self.state.items() if isinstance(value, nn.Module)}
        scalers = {name: value for name, value in self.state.items() if isinstance(value, torch.amp.GradScaler)}
        return Subjects(modules, tuple(self.optimizers), scalers)

    def objects(self) -> dict[str, Any]:
        """What of `state` is neither a module nor a scaler."""
        return {n: v for n, v in self.state.items() if not isinstance(v, (nn.Module, torch.amp.GradScaler))}

    def check_tolerance(self, nodes: int) -> None:
        """Raises ConfigError if more is asked than this version gives."""
        if self.tolerate and nodes > 1:
            raise ConfigError(
                f"tolerate={self.tolerate} on {nodes} nodes: this version survives lost processes only.", "tolerate=0"
            )

    def uncovered(self) -> list[str]:
        """What a restart would not bring back, as far as that can be seen."""
        found = []
        has_scheduler = any(isinstance(value, torch.optim.lr_scheduler.LRScheduler) for value in self.state.values())
        if not has_scheduler and any(hasattr(o.step, "_wrapped_by_lr_sched") for o in self.optimizers):
            found.append("the LR scheduler")
        if not self.objects():
            found.append("the data position")
        return found


@dataclass
class Attachment:
    """One attach of one rank."""

    settings: Config
    launch: Launch
    exchange: Exchange
    request: Request
    erased: set[tuple[str, str, Any]] = field(default_factory=set)
    _registered: bool = False

    def run(self) -> Session:
        """All steps, in order; what this rank took is given back if they fail."""
        try:
            return self._run()
        except Exception:
            if self._registered:
                with contextlib.suppress(ReftError):
                    self.leaser.release()
            raise

    def _run(self) -> Session:
        self.failpoints = Failpoints(self.settings.failpoints)
        self.facts = self.exchange.together(self._introduce)
        self.job, self.nodes = self._agree()
        for attempt in range(self.settings.slots + 1):
            self._plan(self.exchange.together(self._inventory), attempt)
            self.exchange.together(self._decide)
            results = self.exchange.together(self._load)
            if not any(result["damaged"] for result in results):
                break
            self._erase(results)
        else:
            raise RestoreError(
                f"every version of job {self.job.id} that was tried is damaged.", f"reft-cli purge {self.job.id}"
            )
        layout = pack(predicted_leaves(self.subjects, self.subjects.bind()))
        room = layout.data_bytes * self.settings.slots * self.exchange.world
        self.exchange.together(lambda: self._lease(layout), extra_s=room / ALLOCATION_BYTES_PER_S)
        return self._begin(self._tree)

    # introduce

    def _introduce(self) -> dict[str, Any]:
        if self.launch.world > 1 and self.exchange.world == 1:
            raise AttachError(
                f"WORLD_SIZE is {self.launch.world}, but torch.distributed is not initialized.",
                "call init_process_group before reft.attach",
            )
        self.subjects = self.request.subjects()
        self.host = HostState(self.subjects, self.request.objects())
        capsule.encode(self.host.capture(0))
        self.subjects.bind()
        self.address, self.hello = starter.find(self.settings)
        if self.launch.under_agent:
            die_with_parent()
        return {
            "node": self.hello.node, "node_id": self.hello.node_id, "addresses": list(self.hello.addresses),
            "job": self.settings.job, "run_id": self.launch.run_id, "slurm": self.launch.slurm_job,
            "script": str(Path(sys.argv[0]).resolve()) if sys.argv[0] else "script", "user": os.getuid(),
            "launch": launch_mark(self.launch.under_agent), "pid": os.getpid(),
            "ident": secrets.token_hex(16 * (self.settings.slots + 2)), "token": secrets.token_hex(32),
        }  # fmt: skip

    def _agree(self) -> tuple[Job, list[pb.Node]]:
        """The job and its nodes, the same on every rank."""
        first = self.facts[0]
        for rank, facts in enumerate(self.facts):
            if facts["job"] != first["job"]:
                raise ConfigError(f"rank 0 names the job {first['job']!r}, rank {rank} {facts['job']!r}.")
        job = identify(
            chosen=first["job"], run_id=first["run_id"], slurm_job=first["slurm"], script=first["script"], user=first["user"],
            launch=first["launch"],
        )  # fmt: skip
        nodes: dict[str, pb.Node] = {}
        for rank, facts in enumerate(self.facts):
            node = pb.Node(name=facts["node"], id=facts["node_id"], addresses=facts["addresses"])
            nodes.setdefault(facts["node_id"], node).ranks.append(rank)
        self.request.check_tolerance(len(nodes))
        return job, list(nodes.values())

    @property
    def _is_leader(self) -> bool:
        """Whether this rank speaks to its node's daemon for all ranks of the node."""
        return self._node.ranks[0] == self.exchange.rank

    @property
    def _node(self) -> pb.Node:
        return next(node for node in self.nodes if self.exchange.rank in node.ranks)

    def _call(self, method: str, request: Any, deadline_s: float | None = None) -> Any:
        """A call of this node's daemon.

        Raises:
            ReftError: it failed; see `rpc.error_of`.
        """
        with rpc.channel(self.address) as channel:
            try:
                stub = pb_grpc.DaemonStub(channel)
                return getattr(stub, method)(request, timeout=deadline_s or self.settings.attach_deadline_s)
            except grpc.RpcError as error:
                raise rpc.error_of(error, self.address) from error

    # inventory, plan, decide

    def _inventory(self) -> dict[str, Any]:
        if not self._is_leader:
            return {}
        pids = [self.facts[rank]["pid"] for rank in self._node.ranks]
        request = pb.InventoryRequest(job=self.job.id, launch=self.facts[0]["launch"], pids=pids, fence=True)
        return {"reply": text_of(self._call("Inventory", request).SerializeToString())}

    def _plan(self, inventories: Sequence[Mapping[str, Any]], attempt: int) -> None:
        """Pure, from what all ranks were told: the manifest, the plan and the decision."""
        replies = {
            self.facts[rank]["node_id"]: pb.InventoryReply.FromString(bytes_of(inventory["reply"]))
            for rank, inventory in enumerate(inventories)
            if inventory
        }
        held = [messages.held_from(node, header) for node, reply in replies.items() for header in reply.slots]
        decisions = [messages.decision_from(r.decision) for r in replies.values() if r.HasField("decision")]
        newest = recovery.newest_decision(decisions)
        before = next(
            (r.manifest for r in replies.values() if newest and messages.decision_from(r.decision) == newest), None
        )
        self.others = [other for reply in replies.values() for other in reply.others]
        world = before.world if before else self.exchange.world
        self.plan = recovery.plan(held, world, newest, self.erased)
        if self.plan.base is not None and world != self.exchange.world:
            raise RestoreError(
                f"{self.plan.base} of job {self.job.id} is held for {world} ranks, this run has {self.exchange.world}.",
                f"start {world} ranks, or another job name",
            )
        if self.plan.base is None and (self.erased or any(reply.had_whole for reply in replies.values())):
            raise RestoreError(
                self._what_is_lost(before), f"start the missing daemons, or reft-cli purge {self.job.id} to start fresh"
            )
        # A fresh random id for each try: two decisions of one attach must not look the same.
        ident = bytes.fromhex(self.facts[0]["ident"])[16 * attempt :][:16]
        epoch = recovery.next_epoch(decisions, held, ident)
        self.decision = recovery.Decision(epoch, self.plan.base)
        self.manifest = pb.Manifest(
            job=self.job.id, named=self.job.named, token=before.token if before else bytes.fromhex(self.facts[0]["token"]),
            world=self.exchange.world, nodes=self.nodes, script=self.facts[0]["script"], every=self.request.every,
            launch=self.facts[0]["launch"],
        )  # fmt: skip

    def _what_is_lost(self, before: pb.Manifest | None) -> str:
        """Why a job that had a whole version has none now."""
        here = {node.id for node in self.nodes}
        gone = [node.name for node in before.nodes if node.id not in here] if before else []
        parts = [f"{version}: ranks {list(ranks)[:8]} are missing" for version, ranks in self.plan.partial[:3]]
        parts += [f"{version} on node {node}: damaged" for node, _, version in sorted(self.erased, key=str)]
        parts += [f"node {name} does not take part, or came back empty" for name in gone]
        return f"job {self.job.id} was held whole, but no version is whole now ({'; '.join(parts) or 'no slots are left'})."

    def _decide(self) -> dict[str, Any]:
        if self._is_leader:
            dropped = [slot.slot for slot in self.plan.dropped if slot.node == self._node.id]
            index = [node.id for node in self.nodes].index(self._node.id)
            decision = messages.decision_to(self.decision)
            self._call(
                "Decide", pb.DecideRequest(manifest=self.manifest, decision=decision, node_index=index, dropped=dropped)
            )
        return {}

    # load, lease

    def _load(self) -> dict[str, Any]:
        """Registers as the rank's trainer, and loads; says what was damaged instead of raising, so that all go on together."""
        self._tree = None
        self.leaser = Leaser(
            self.address,
            self.hello.handout,
            self.job.id,
            self.decision.epoch,
            self.exchange.rank,
            self.settings,
            self.launch.under_agent,
            self._on_cuda,
        )
        self.leaser.register()
        self._registered = True
        source = self.plan.sources.get(self.exchange.rank)
        if source is None:
            return {"damaged": ""}
        try:
            slot = self._local(source) if source.node == self._node.id else self._remote(source)
            facts = {"rank": self.exchange.rank, "epoch": self.decision.epoch.counter}
            self._tree = restore.load(
                slot, self.subjects, lambda chunk: self.failpoints.hit("restore.chunk", chunk=chunk, **facts)
            )
            self.host.restore(self._tree)
        except restore.BadSlot as error:
            return {"damaged": str(error)}
        return {"damaged": ""}

    def _erase(self, results: Sequence[Mapping[str, Any]]) -> None:
        """Notes the slots that were damaged, on every rank alike, and withdraws for another try."""
        for rank, result in enumerate(results):
            if result["damaged"]:
                source = self.plan.sources[rank]
                self.erased.add((source.node, source.slot, source.version))
                if self.exchange.rank == 0:
                    say(f"{result['damaged']} Going back to an older version.")
        self.leaser.release()
        self._registered = False

    def _local(self, source: recovery.Held) -> SlotMap:
        return self.leaser.take([source.slot])[0].map

    def _remote(self, source: recovery.Held) -> SlotMap:
        """The bytes of a slot on another node's daemon: this rank ran there before."""
        node = next(node for node in self.nodes if node.id == source.node)
        base = self.plan.base
        assert base is not None, "a source without a base"
        request = pb.ReadRequest(job=self.job.id, slot=source.slot, version=messages.version_to(base), size=1 << 62)
        metadata = rpc.token_metadata(self.manifest.token)
        failures = []
        for address in node.addresses:
            with rpc.channel(address) as channel:
                try:
                    chunks = pb_grpc.DaemonStub(channel).Read(
                        request, timeout=self.settings.attach_deadline_s, metadata=metadata
                    )
                    data = bytearray()
                    for chunk in chunks:
                        data += chunk.data
                    return SlotMap(np.frombuffer(data, np.uint8))
                except grpc.RpcError as error:
                    failures.append(str(rpc.error_of(error, address)))
        raise RestoreError(
            f"rank {self.exchange.rank} ran on node {node.name} before, and can't read its state there: {failures}."
        )

    def _lease(self, layout: Layout) -> dict[str, Any]:
        self.slots = self.leaser.lease(layout, messages.table_to(layout))
        return {}

    # begin

    def _begin(self, tree: Mapping[str, Any] | None) -> Session:
        epoch, base = self.decision.epoch, self.decision.base
        reporter = Reporter(
            self.address, self.job.id, epoch, self.exchange.rank, self.settings.rpc_deadline_s, self.failpoints
        )
        snapshots = Snapshots(
            self.subjects, self.host, self._copier(), reporter, self.failpoints, self.exchange.rank, epoch, base,
            self.slots, self.leaser,
        )  # fmt: skip
        moved = any(source.node != self._node_of(rank).id for rank, source in self.plan.sources.items())
        restored_from = None if base is None else "peers" if moved else "memory"
        if self.exchange.rank == 0:
            self._announce(restored_from)
        session = Session(
            snapshots, self.subjects.optimizers, step=base.step if base else 0, restored_from=restored_from,
            counts_calls=tree is not None and not tree["marked"], every=self.request.every,
            seal_deadline_s=self.settings.seal_deadline_s,
            is_protected=len(self.nodes) == 1 or self.request.tolerate == 0,
        )  # fmt: skip
        if tree is not None:
            host_state.restore_random(tree["random"])
        return session

    @property
    def _on_cuda(self) -> bool:
        return any(parameter.device.type == "cuda" for _, parameter in self.subjects.parameter_names())

    def _copier(self) -> Copier:
        if self._on_cuda:
            from reft.client.cuda_copier import CudaCopier

            return CudaCopier()
        return CpuCopier(copy_cpus())

    def _node_of(self, rank: int) -> pb.Node:
        return next(node for node in self.nodes if rank in node.ranks)

    def _announce(self, restored_from: str | None) -> None:
        """What was restored and what is not covered, once."""
        job, base = self.job, self.decision.base
        if base is not None:
            say(
                f"job {job.id}: restored {base} from {restored_from}, {self.exchange.world} ranks on {len(self.nodes)} nodes."
            )
        else:
            say(f"job {job.id}: nothing held, starting fresh; {self.exchange.world} ranks on {len(self.nodes)} nodes.")
        for version, ranks in self.plan.partial:
            say(f"{version} was not used: ranks {list(ranks)[:8]} do not hold it.")
        earlier = [o for o in self.others if o.HasField("newest") and o.script == self.facts[0]["script"]]
        if base is None and not job.named and earlier:
            last = min(earlier, key=lambda other: other.age_s)
            say(
                f"step {last.newest.step} of an earlier run, which ended {last.age_s:.0f} s ago, is held as job {last.job}. "
                f"To go on from it: REFT_JOB={last.job}"
            )
        if len(self.nodes) > 1 and self.request.tolerate is None:
            say("snapshots survive lost processes, not a lost node: redundancy among nodes is not in this version.")
        if self.request.schedule is not None:
            say("copies run beside compute; placing them by the pipeline's schedule is not in this version.")
        if self.exchange.world > 2 and any(_regroups(module) for module in self.subjects.modules.values()):
            say(
                "DDP regroups its gradients after a process's first backward pass, so steps after a restart may differ in their "
                "last bits; find_unused_parameters=True keeps the grouping."
            )
        uncovered = self.request.uncovered()
        if uncovered:
            say(f"not covered: {' and '.join(uncovered)}; pass them in state= to bring them back too.")


def _regroups(module: nn.Module) -> bool:
    """Whether the order in which gradients are added depends on where the process began."""
    return isinstance(module, nn.parallel.DistributedDataParallel) and not module.find_unused_parameters
