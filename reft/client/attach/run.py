"""The steps of attach, which all ranks take together.

    name        agree on the names of the leaves of pipeline stages
    introduce   find or start this node's daemon; every rank learns the facts of all ranks
    describe    for each symbolic table one rank publishes the table; find mismatched leaves
    inventory   one rank a node: end orphans, read the headers of all held slots and capsules;
                one rank surveys absent nodes
    plan        the same pure functions on every rank: base version and readers, or a fresh start;
                the new placement
    decide      one rank a node: store the decision, before any rank loads
    open, load  every rank: register as trainer, slots ─► live tensors
                (after a damaged slot: back to inventory, without that slot)
    lease       one rank a node: store the base's capsules with their holders again;
                every rank: slots for the next snapshots, every page touched
    begin       host state, random generators last; if a node of the base was lost, take the first
                snapshot now

Each step ends with an exchange. An error of one rank is raised on all ranks within a deadline, so
no rank hangs.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import torch

from reft.client.attach import rank_table, report, stage_names
from reft.client.attach.absent_nodes import AbsentNodeSurvey, survey_absent_nodes
from reft.client.attach.arguments import AttachArguments
from reft.client.attach.launcher import die_with_parent
from reft.client.attach.rank_table import RankTable
from reft.client.link.rank_group import RankGroup, bytes_of, text_of
from reft.client.link.reports import Reporter, ReporterFacts
from reft.client.link.slots import ALLOCATION_BYTES_PER_S, SlotLeases
from reft.client.memory.cuda import Device
from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.memory.threads import ComputeThreads, copy_cpus, has_idle_cores
from reft.client.restore.decode import decoder_for
from reft.client.restore.materialize import missing_state_buffer
from reft.client.restore.remote_slots import RemoteSlots
from reft.client.restore.reshard import ReshardRestore, is_reshaped, leaves_by_rank
from reft.client.restore.restore import Restore
from reft.client.restore.transport import Transport, transport_of
from reft.client.session import Session
from reft.client.snapshot import replica_check
from reft.client.snapshot.cpu_engine import CpuCopyEngine
from reft.client.snapshot.engine import CopyEngine
from reft.client.snapshot.rank_slots import RankSlots
from reft.client.snapshot.replica_check import are_mismatched
from reft.client.snapshot.save_planner import SavePlanner
from reft.client.snapshot.snapshot_thread import SnapshotFacts
from reft.client.snapshot.snapshotter import Snapshotter
from reft.client.snapshot.task import SnapshotHistory
from reft.client.state import random_state
from reft.client.state.host_state import HostState
from reft.config import Config, Launch
from reft.console import say
from reft.core.commit.decision import Decision
from reft.core.commit.snapshot_cadence import SnapshotCadence
from reft.core.commit.snapshot_interval import DueSteps, FailureHistory, IntervalEstimator
from reft.core.commit.version import Version
from reft.core.layout import symbolic
from reft.core.layout.layout import pack
from reft.core.recovery.lineage import known_to, next_epoch
from reft.errors import AttachError, ReftError, RestoreError
from reft.failpoints import Failpoints
from reft.wire import daemon_launcher, local_socket, manifest, messages, rpc
from reft.wire.daemon_launcher import DaemonRestarter
from reft.wire.inventory import JobSurvey
from reft.wire.manifest import division_of, domains_of, inline_bytes_max, layouts_of, placement_of, placing
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc


@dataclass
class Attachment:
    """One attach of one rank.

    Attributes:
        erased: node id, slot and version of everything that was found damaged, or was given up.
        restore_buffer: memory for the state to restore; made once a restore is likely.
    """

    settings: Config
    launch: Launch
    rank_group: RankGroup
    request: AttachArguments
    erased: set[tuple[str, str, Any]] = field(default_factory=set)
    restore_buffer: HugePageBuffer = field(default_factory=lambda: HugePageBuffer(0))
    _before: JobSurvey | None = None  # the survey of the first try, during later tries
    _registered: bool = False

    def run(self) -> Session:
        """Runs all steps in order; releases this rank's registration if a step fails."""
        try:
            return self._run()
        except Exception:
            if self._registered:
                with contextlib.suppress(ReftError):
                    self.leases.release()
            raise
        finally:
            self.restore_buffer.close()

    def _run(self) -> Session:
        self.failpoints = Failpoints(self.settings.failpoints)
        self.tracked = stage_names.named(self.rank_group, self.request.tracked)
        self.rank_table = RankTable(self.rank_group.gather_or_raise(self._introduce))
        self.job, self.nodes = self.rank_table.job(), self.rank_table.nodes()
        self._describe(self.rank_group.gather_or_raise(self._description))
        for attempt in range(self.settings.slots + 1):
            self._find(self.rank_group.gather_or_raise(self._inventory))
            self._plan(attempt)
            self.rank_group.gather_or_raise(self._decide)
            damaged = self._restore()
            if not damaged:
                break
            # All ranks together: the next inventory must not find a rank that is still registered.
            self.rank_group.gather_or_raise(partial(self._erase, damaged))
            self._before = self._before or self.job_survey
            # Remove the state that this try has made: an older version may not have it.
            self.tracked.bind().rollback_to(self.tensor_index)
            self.restore_buffer.close()
            self.restore_buffer = HugePageBuffer(0)  # frees the memory of the removed state
        else:
            raise RestoreError(
                f"every version of job {self.job.id} that was tried is damaged.", f"reft-cli purge {self.job.id}"
            )
        slot_bytes = (
            self.placement.rank_placement(self.rank_group.rank).data_bytes * self.settings.slots * self.rank_group.world
        )
        self.rank_group.gather_or_raise(self._lease, extra_s=slot_bytes / ALLOCATION_BYTES_PER_S)
        return self._begin()

    # introduce, describe

    def _introduce(self) -> dict[str, Any]:
        if self.launch.world > 1 and self.rank_group.world == 1:
            raise AttachError(
                f"WORLD_SIZE is {self.launch.world}, but torch.distributed is not initialized.",
                "call init_process_group before reft.attach",
            )
        self.host = HostState(self.tracked, {**self.request.objects(), **self.tracked.extra_states()})
        self.host.check_size()
        self.tensor_index = self.tracked.bind()
        leaves = [*self.tensor_index.leaves(), *self.tracked.predict()]
        self.predicted = pack(leaves)
        identity = rank_table.identity_facts(self.settings, self.launch)
        self.address, self.hello = daemon_launcher.find(self.settings, job=rank_table.job_of(identity).id)
        self.own = local_socket.introduce(self.hello.local_socket, self.settings.attach_deadline_s)
        if self.hello.held:
            self._prefault()
        self.symbolic, self.table = symbolic.symbolic_form(leaves), messages.table_to(self.predicted)
        if self.launch.under_agent:
            die_with_parent()
        return {
            "node": self.hello.node, "node_id": self.hello.node_id, "addresses": list(self.hello.addresses),
            "domain": self.hello.domain, "pid": self.own.process.pid, **rank_table.team_facts(ComputeThreads.own()), **identity,
            **(self._secrets() if self.rank_group.rank == 0 else {}),
            **rank_table.layout_facts(self.predicted, self.symbolic), **rank_table.agreed_facts(self.request, self.settings),
        }  # fmt: skip

    def _prefault(self) -> None:
        """Starts to make memory in the background for the state that will probably be restored."""
        self.restore_buffer = missing_state_buffer(self.predicted.leaves, self.tracked, self.tensor_index)

    def _secrets(self) -> dict[str, str]:
        return {"ident": secrets.token_hex(16 * (self.settings.slots + 2)), "token": secrets.token_hex(32)}

    def _description(self) -> dict[str, Any]:
        is_mine = self.rank_table.describes(self.rank_group.rank)
        return {"table": text_of(manifest.table_to(self.symbolic.table))} if is_mine else {}

    def _describe(self, descriptions: Sequence[Mapping[str, Any]]) -> None:
        """Makes the new manifest, with the layouts and the mismatched leaves."""
        first = self.rank_table.facts[0]
        tables, layouts, index = self.rank_table.layouts(descriptions)
        tolerate = -1 if self.request.tolerate is None else self.request.tolerate
        self.manifest = pb.Manifest(
            job=self.job.id, named=self.job.named, token=bytes.fromhex(first["token"]), world=self.rank_group.world,
            nodes=self.nodes, script=first["script"], every=self.request.every, launch=first["launch"],
            protect=self.request.protect, tolerate=tolerate, chunk_bytes=self.settings.chunk_bytes, tables=tables,
            layouts=layouts, layout_of=index,
        )  # fmt: skip
        self.division = division_of(self.manifest, inline_bytes_max(domains_of(self.manifest)), ())
        names = layouts_of(self.manifest)[0].names
        self.manifest.mismatched.extend(
            replica_check.find_mismatched(self.rank_group, self.division, names, self.tensor_index)
        )

    @property
    def _is_leader(self) -> bool:
        """Whether this rank speaks to its node's daemon for all ranks of the node."""
        return self._node.ranks[0] == self.rank_group.rank

    @property
    def _node(self) -> pb.Node:
        return self._node_of(self.rank_group.rank)

    def _node_of(self, rank: int) -> pb.Node:
        return next(node for node in self.nodes if rank in node.ranks)

    def _call(self, method: str, request: Any, deadline_s: float | None = None) -> Any:
        """Calls a method of this node's daemon, and returns the reply.

        Raises:
            ReftError: the call failed; see `rpc.error_of`.
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
        pids = [self.rank_table.facts[rank]["pid"] for rank in self._node.ranks]
        launch = self.rank_table.facts[0]["launch"]
        request = pb.InventoryRequest(job=self.job.id, launch=launch, pids=pids, end_orphans=True)
        return {"reply": text_of(self._call("Inventory", request).SerializeToString())}

    def _find(self, inventories: Sequence[Mapping[str, Any]]) -> None:
        """Surveys all daemons, also those of the old manifest that no longer take part."""
        replies = {
            self.rank_table.facts[rank]["node_id"]: pb.InventoryReply.FromString(bytes_of(inventory["reply"]))
            for rank, inventory in enumerate(inventories)
            if inventory
        }
        self.job_survey = JobSurvey(replies, before=self._before)
        absent = self.job_survey.absent(self.nodes)
        if not absent:
            return
        # Any daemon that knows the job has the job's token; the first of these daemons asks.
        asker = next(rank for rank, inventory in enumerate(inventories) if inventory and self._daemon_knows_job(rank))
        ask = AbsentNodeSurvey(self.rank_group, asker, self._call, self.job.id, self.manifest.launch, self.launch.round)
        self.job_survey = survey_absent_nodes(self.job_survey, absent, ask, self.erased)

    def _daemon_knows_job(self, rank: int) -> bool:
        return self.job_survey.replies[self.rank_table.facts[rank]["node_id"]].HasField("decision")

    def _plan(self, attempt: int) -> None:
        """Makes the plan, the decision and the new placement, from facts that all ranks know."""
        before = self.job_survey.manifest
        self.job_survey.inventory.refuse_rivals(self.job.id)
        self.plan = self.job_survey.plan(self.erased)
        base = self.plan.base
        if base is None and not self._may_start_fresh():
            raise RestoreError(
                report.lost(self.job.id, self.job_survey, self.plan, self.erased),
                report.lost_remedy(self.job.id, self.job_survey),
            )
        if base is None:
            self.restore_buffer.close()
        elif not attempt and not self.restore_buffer.nbytes:
            self._prefault()
        # A new random id for each try: two decisions of one attach must differ.
        ident = bytes.fromhex(self.rank_table.facts[0]["ident"])[16 * attempt :][:16]
        decisions = list(self.job_survey.inventory.decisions.values())
        epoch = next_epoch(decisions, self.job_survey.held, ident)
        self.decision = Decision(epoch, base, known_to(decisions))
        if before is not None:
            self.manifest.token = before.token
        self.manifest.trained_s, self.manifest.failures = self.job_survey.inventory.history
        mismatched = self._mismatched(self.manifest.mismatched, self.job_survey.manifests[base.epoch] if base else None)
        del self.manifest.mismatched[:]
        self.manifest.mismatched.extend(mismatched)
        self.placement = placement_of(self.manifest, self.division)
        self._is_reshaped = base is not None and is_reshaped(self.job_survey.manifests[base.epoch], self.manifest)

    def _may_start_fresh(self) -> bool:
        return not self.erased and not self.job_survey.inventory.had_whole  # else a person must decide

    def _mismatched(self, mismatched_now: Sequence[str], base: pb.Manifest | None) -> list[str]:
        """Returns the mismatched leaves, of which each rank keeps its own copy.

        Args:
            mismatched_now: leaves that are mismatched at this attach.
            base: manifest of the base; None for a fresh start.
        """
        # Before a restore the model has random values, so only the base's mismatched leaves count.
        return list(mismatched_now if base is None else base.mismatched)

    def _decide(self) -> dict[str, Any]:
        if self._is_leader:
            request = pb.DecideRequest(
                manifest=self.manifest,
                decision=messages.decision_to(self.decision),
                node_index=[node.id for node in self.nodes].index(self._node.id),
                dropped=[slot.slot for slot in self.plan.dropped if slot.node == self._node.id],
            )
            if self.plan.base is not None:
                request.base_manifest.CopyFrom(self.job_survey.manifests[self.plan.base.epoch])
            self._call("Decide", request)
        return {}

    # open, load, lease

    def _restore(self) -> list[int]:
        """Registers this rank and restores the base.

        Returns:
            The ranks whose slots were damaged, the same on every rank; empty after a success.
        """
        self._host_tree: dict[str, Any] | None = None
        self._reshard: ReshardRestore | None = None
        self.rank_group.gather_or_raise(self._register)
        if self.plan.base is None:
            return []
        facts = {"rank": self.rank_group.rank, "epoch": self.decision.epoch.counter}
        hit = lambda chunk: self.failpoints.hit("restore.chunk", chunk=chunk, **facts)  # noqa: E731
        if self._is_reshaped:
            self._reshard = self._make_reshard(self.plan.base)
            damaged = self._reshard.run(self._transport, hit)
            if not damaged:
                self._host_tree = self._reshard.finish()
            return damaged
        with contextlib.closing(self._make_restore(self.plan.base)) as restore:
            results = self.rank_group.gather_or_raise(restore.open, extra_s=restore.remote_read_s)
            is_mismatched = are_mismatched(each["compared"] for each in results)
            damaged = list(range(self.rank_group.world)) if is_mismatched else self._damaged(results)
            if damaged:
                return damaged
            load = lambda: {"damaged": restore.load(self._transport(), hit)}  # noqa: E731
            damaged = self._damaged(self.rank_group.gather_or_raise(load))
            if not damaged:
                self._host_tree = restore.finish()
            return damaged

    def _transport(self) -> Transport | None:
        """Returns the transport between ranks for a load; all ranks call it together.

        None if there is only one rank.
        """
        group, deadline_s = self.rank_group.group, self.settings.attach_deadline_s
        return group and transport_of(self.settings.load_transport, group, self._device, deadline_s)

    def _register(self) -> dict[str, Any]:
        self.leases = SlotLeases(
            self.address, self.hello.local_socket, self.job.id, self.decision.epoch, self.rank_group.rank, self.settings,
            self.own, self.launch.under_agent, self._device if self._on_cuda else None,
        )  # fmt: skip
        self.leases.register()
        self._registered = True
        return {}

    def _make_restore(self, base: Version) -> Restore:
        layouts, index = layouts_of(self.job_survey.manifests[base.epoch])
        return Restore(
            self.plan, self.job_survey.placements[base.epoch], self.rank_group.rank, self._node.id,
            {node.id: list(node.ranks) for node in self.nodes}, layouts[index[self.rank_group.rank]].leaves, self.leases,
            self._remote(), self.tracked, self.tensor_index, self.host, self.restore_buffer,
            decoder_for(self._device, self.settings.parity_scratch_bytes),
        )  # fmt: skip

    def _make_reshard(self, base: Version) -> ReshardRestore:
        before = self.job_survey.manifests[base.epoch]
        return ReshardRestore(
            self.plan, self.job_survey.placements[base.epoch], leaves_by_rank(before), leaves_by_rank(self.manifest),
            before.mismatched, self.rank_group.rank, self._node.id, {node.id: list(node.ranks) for node in self.nodes},
            self.leases, self._remote(), self.tracked, self.tensor_index, self.host, self.restore_buffer, self.rank_group,
        )  # fmt: skip

    def _remote(self) -> RemoteSlots:
        nodes = {**self.job_survey.nodes, **{node.id: node for node in self.nodes}}
        return RemoteSlots(self.job.id, self.address, self._node.id, nodes, self.settings.attach_deadline_s)

    def _damaged(self, results: Sequence[Mapping[str, Any]]) -> list[int]:
        return sorted({rank for result in results for rank in result["damaged"]})

    def _erase(self, damaged: Sequence[int]) -> dict[str, Any]:
        """Excludes the damaged slots from the next try, and ends this rank's registration.

        Args:
            damaged: the ranks whose slots were damaged; the same on every rank.
        """
        for rank in damaged:
            source: Any = self.plan.sources.get(rank) or self.plan.capsules[rank]
            self.erased.add((source.node, source.slot, source.version))
        if self.rank_group.rank == 0:
            say(report.set_aside(self.plan.base, damaged))
        self.leases.release()
        self._registered = False
        return {}

    def _lease(self) -> dict[str, Any]:
        if self._is_leader and self.plan.base is not None:
            epoch = messages.epoch_to(self.decision.epoch)
            self._call("Secure", pb.SecureRequest(job=self.job.id, epoch=epoch))
        self.slots = self.leases.lease(self.placement.rank_placement(self.rank_group.rank).data_bytes, len(self.table))
        return {}

    # begin

    def _begin(self) -> Session:
        base, tree = self.decision.base, self._host_tree
        snapshots = self._snapshots(SnapshotHistory(), base.step if base else 0)
        moved = self._reshard is not None or any(
            source.node != self._node_of(rank).id for rank, source in self.plan.sources.items()
        )
        restored_from = None if base is None else "peers" if moved or self.plan.capsules else "memory"
        session = Session(
            snapshots,
            self.tracked.optimizers,
            step=base.step if base else 0,
            restored_from=restored_from,
            counts_calls=tree is not None and not tree["marked"],
            cadence=self._cadence(),
            seal_deadline_s=self.settings.seal_deadline_s,
            schedule=self.request.schedule,
        )
        if self.rank_group.rank == 0:
            self._announce(restored_from)
        if tree is not None:
            if tree["marked"]:
                session.resume_marking()
            random_state.restore(tree["random"])
            if self._must_protect_again:
                session.protect_again(tree["marked"])
        return session

    def _snapshots(self, history: SnapshotHistory, step: int) -> Snapshotter:
        rank, epoch, engine = self.rank_group.rank, self.decision.epoch, self._copy_engine()
        reporter = Reporter(
            ReporterFacts(
                self.address, self.hello.local_socket, self.job.id, epoch, rank, self.settings.rpc_deadline_s
            ),
            self.failpoints,
            DaemonRestarter(self.settings, self.hello.unattended).refused,
        )
        return Snapshotter(
            SnapshotFacts(rank, epoch, self.placement, step + 2 * self.request.every, self.failpoints),
            self.decision.base,
            SavePlanner(self.tracked, self.placement, rank, engine.parity_tiling, self.predicted.leaves),
            self.host,
            engine,
            reporter,
            RankSlots(self.slots, self.leases, rank),
            history,
        )

    def _cadence(self) -> SnapshotCadence:
        due_steps = DueSteps(self.request.every, self.request.adapts)
        mtbf_s = self.settings.mtbf_s or FailureHistory(self.manifest.trained_s, self.manifest.failures).mtbf_s
        return SnapshotCadence(due_steps, IntervalEstimator(self.settings.overhead_budget, mtbf_s))

    @property
    def _must_protect_again(self) -> bool:
        """Whether the base has lost a node, or the placement has changed since."""
        before = self.job_survey.manifests[self.decision.base.epoch] if self.decision.base else self.manifest
        return bool(self.plan.capsules) or placing(before) != placing(self.manifest)

    def _announce(self, restored_from: str | None) -> None:
        """Prints once the restored state, and the parts that a restart would not restore."""
        lines = report.restored(
            self.job.id, self.decision.base, restored_from, self.manifest, self.job_survey, self.plan
        )
        if self._reshard is not None:
            lines += report.reshaped(len(self._reshard.before), self.rank_group.world, self._reshard.lines)
        if self.decision.base is None and not self.job.named:
            lines += report.earlier_runs(self.job_survey, self.manifest.script)
        lines += report.exposure(self.placement)
        lines += report.not_covered(self.request, self.tracked, self.rank_group.world)
        for line in lines:
            say(line)

    @property
    def _device(self) -> torch.device:
        """The device of this rank's state: the CUDA device of any parameter, else the CPU."""
        devices = (named.local.device for named in self.tracked.parameters())
        return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))

    @property
    def _on_cuda(self) -> bool:
        return self._device.type == "cuda"

    def _copy_engine(self) -> CopyEngine:
        if self._on_cuda:
            from reft.client.snapshot.cuda_engine import CudaCopyEngine

            device, settings = Device(self._device), self.settings
            return CudaCopyEngine(device, settings.parity_scratch_bytes, settings.overrun_scratch_bytes)
        teams = [rank_table.team_of(self.rank_table.facts[rank]) for rank in self._node.ranks]
        return CpuCopyEngine(copy_cpus(), has_idle=has_idle_cores(ComputeThreads.own(), teams))
