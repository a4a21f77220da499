"""The first steps of attach: every rank learns the facts of all ranks, and the manifest follows.

introduce   this rank's state, this node's daemon ─► RankInfo ═► all ranks ─► Introduction
describe    one rank for each symbolic table: the table ═► all ranks ─► Description; at the start
            short tables have come with the inventory
compare     digests of replicas ═► all ranks ─► mismatched leaves
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from reft.client.attach.arguments import AttachContext
from reft.client.attach.launcher import die_with_parent
from reft.client.attach.local_state import LocalState, RestoreMemory
from reft.client.attach.rank_table import (
    IDENT_BYTES,
    AgreedSettings,
    IdentityFacts,
    JobSecrets,
    LayoutFacts,
    NodeIdentity,
    ProcessFacts,
    RankInfo,
    RankTable,
)
from reft.client.link.exchange import RankMessage, gather, share
from reft.client.memory.threads import ComputeThreads
from reft.client.snapshot.replica_check import find_mismatched
from reft.client.state.tracked_objects import TrackedObjects
from reft.config import Launch, job_key_variables
from reft.core.budget import default_slots
from reft.core.layout.cells import Division
from reft.core.membership.job_identity import JobIdentity
from reft.core.persist.stored_names import LINEAGE_BYTES
from reft.errors import AttachError, DaemonUnavailable
from reft.wire import daemon_launcher, job_key, local_socket, manifest, messages, rpc
from reft.wire.manifest import division_of, domains_of, inline_bytes_max, layouts_of
from reft.wire.v1 import daemon_pb2 as pb

JOB_TOKEN_S = 10.0  # an agent beats three times a second, and its daemon may just have been restarted
JOB_TOKEN_PAUSE_S = 0.05
SHORT_TABLE = 1 << 20  # longer ones travel alone: the facts of one rank have a limit (FACTS_MAX)
AGENTS_KEY = "the agent's"  # instead of a key's mark: agents with different keys meet nowhere


@dataclass(frozen=True)
class NodeDaemon:
    """This node's daemon, as it answered this rank.

    Attributes:
        address: address of its gRPC socket.
        hello: its first answer.
        caller: this process as the daemon sees it.
        calls: makes the calls.
        deadline_s: deadline of one call.
    """

    address: str
    hello: pb.HelloReply
    caller: local_socket.CallerProcess
    calls: rpc.DaemonCalls
    deadline_s: float

    @classmethod
    def find(cls, context: AttachContext, job: str) -> NodeDaemon:
        """Returns this node's daemon; starts a daemon if none was named and none runs.

        An agent starts workers again at once. A named daemon that died with them gets some seconds.

        Raises:
            ReftError: see `daemon_launcher.find` and `await_job_token`.
        """
        deadline_s = context.settings.attach_deadline_s
        address, hello = daemon_launcher.find(
            context.settings, job=job, call=context.calls.call, is_restart=context.launch.under_agent
        )
        if context.launch.is_keyed:
            hello = await_job_token(address, job, context.launch.launch)
        caller = local_socket.introduce(hello.local_socket, deadline_s)
        return cls(address, hello, caller, context.calls, deadline_s)

    def call(self, method: str, request: Any, deadline_s: float | None = None) -> Any:
        """Calls a method of the daemon, and returns the reply.

        Raises:
            ReftError: the call failed; see `rpc.call`.
        """
        with self._remedy():
            return self.calls.call(self.address, method, request, deadline_s or self.deadline_s)

    @contextlib.contextmanager
    def begun(self, method: str, request: Any) -> Iterator[None]:
        """Calls a method of the daemon while the block runs; see `DaemonCalls.begun`.

        Raises:
            ReftError: the call failed.
        """
        with self._remedy(), self.calls.begun(self.address, method, request, self.deadline_s):
            yield

    @contextlib.contextmanager
    def _remedy(self) -> Iterator[None]:
        """Says in errors of the block that attach would start the daemon again."""
        try:
            yield
        except DaemonUnavailable as error:
            if not self.hello.unattended:
                raise
            raise DaemonUnavailable(
                error.message,
                "start the job again: attach starts a daemon where none runs. daemon.log beside that socket says why the last "
                "one ended",
            ) from error

    def ask_persist(self, job: str, deadline_s: float) -> None:
        """Asks for a checkpoint of the newest whole step.

        Raises:
            ReftError: the call failed, or the job is not persisted.
        """
        self.call("PersistJob", pb.PersistJobRequest(job=job), deadline_s)


def await_job_token(address: str, job: str, launch: str) -> pb.HelloReply:
    """Returns the daemon's HelloReply with the job's token.

    The daemon has that token once it has heard the agent of this launch, which has the job key.

    Raises:
        AttachError: the daemon has not heard the agent in time.
        DaemonUnavailable: the daemon does not answer.
    """
    end = time.monotonic() + JOB_TOKEN_S
    while not (hello := daemon_launcher.hello(address, job=job, launch=launch)).job_token:
        if time.monotonic() > end:
            raise AttachError(
                f"the torchrun agent has a job key, and within {JOB_TOKEN_S:.0f} s the daemon at {address} has not got the job's "
                "token from it.",
                "REFT_DAEMON must be the same for torchrun and its workers",
            )
        time.sleep(JOB_TOKEN_PAUSE_S)
    return hello


@dataclass(frozen=True)
class Introduction:
    """The result of the step introduce.

    Attributes:
        rank: this rank.
        state: the state of this rank.
        daemon: the daemon of this rank's node.
        ranks: the infos of all ranks.
        job: the job of all ranks.
        nodes: the nodes of all ranks.
    """

    rank: int
    state: LocalState
    daemon: NodeDaemon
    ranks: RankTable
    job: JobIdentity
    nodes: Sequence[pb.Node]

    @property
    def node(self) -> pb.Node:
        """The node of this rank."""
        return self.node_of(self.rank)

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks to its node's daemon for all ranks of the node."""
        return leader_of(self.node) == self.rank

    @property
    def ranks_by_node(self) -> dict[str, list[int]]:
        """Node id → the ranks that run there."""
        return {node.id: list(node.ranks) for node in self.nodes}

    def node_of(self, rank: int) -> pb.Node:
        """Returns the node of a rank."""
        return next(node for node in self.nodes if rank in node.ranks)


@dataclass(frozen=True)
class Description:
    """The result of the step describe.

    Attributes:
        manifest: the new manifest, before anything is known of an earlier attach.
        division: the cells, if all replicas are equal.
    """

    manifest: pb.Manifest
    division: Division


def leader_of(node: pb.Node) -> int:
    """Returns the rank that speaks to the node's daemon for all ranks of the node."""
    return node.ranks[0]


def check_process_group(launch: Launch, world: int) -> None:
    """Raises AttachError if there are other ranks and torch.distributed can't reach them.

    Args:
        launch: facts from the launcher's environment.
        world: the number of ranks that torch.distributed reaches.
    """
    if launch.world > 1 and world == 1:
        raise AttachError(
            f"WORLD_SIZE is {launch.world}, but torch.distributed is not initialized.",
            "call init_process_group before reft.attach",
        )


def introduce(context: AttachContext, tracked: TrackedObjects, memory: RestoreMemory | None) -> Introduction:
    """Exchanges what each rank knows of itself. All ranks call it together.

    Args:
        context: what every step needs.
        tracked: the tracked objects, with names that mean the same on all ranks.
        memory: gets memory for the state, if the daemon holds the job; None if nothing will be
            restored.

    Raises:
        ReftError: a rank has no daemon or state that reft can't hold, or the ranks differ.
    """
    allows_pickles = context.settings.allow_pickled_extra_state
    return introduce_state(context, lambda: LocalState.of(tracked, context.request, allows_pickles), memory)


def introduce_state(
    context: AttachContext, make_state: Callable[[], LocalState], memory: RestoreMemory | None
) -> Introduction:
    """Does so with a state that `make_state` returns on this rank; see `introduce`."""

    def introduce_self() -> tuple[tuple[LocalState, NodeDaemon], RankInfo]:
        check_process_group(context.launch, context.rank_group.world)
        state = make_state()
        identity = IdentityFacts.of(context.settings, context.launch)
        daemon = NodeDaemon.find(context, identity.identify().id)
        if memory is not None and daemon.hello.held:
            memory.make(state)
        info = rank_info(context, state, daemon, identity)
        if context.launch.under_agent:
            die_with_parent()
        return (state, daemon), info

    (state, daemon), infos = share(context.rank_group, introduce_self, RankInfo)
    ranks = RankTable(infos)
    return Introduction(context.rank, state, daemon, ranks, ranks.job(), ranks.nodes())


def rank_info(context: AttachContext, state: LocalState, daemon: NodeDaemon, identity: IdentityFacts) -> RankInfo:
    """Returns what this rank tells all ranks."""
    hello = daemon.hello
    key_mark, token = keyed_token(hello, identity.identify().id)
    tries = (context.settings.slots or default_slots(True, True)) + 1
    return RankInfo(
        node=NodeIdentity(hello.node, hello.node_id, tuple(hello.addresses), hello.domain),
        process=ProcessFacts.of(daemon.caller.process.pid, ComputeThreads.own()),
        identity=identity,
        layout=LayoutFacts.of(state.predicted, state.symbolic),
        agreed=AgreedSettings.of(context.request, context.settings),
        slots=context.settings.slots,
        persists=hello.persists,
        secrets=None if context.rank else make_secrets(tries, token),
        key_mark=key_mark,
    )


def keyed_token(hello: pb.HelloReply, job: str) -> tuple[str, bytes]:
    """Returns a mark of the job key, and its token; empty without a key.

    Under reft's agent the token comes from the daemon. Under another launcher each rank reads the
    key itself.

    Args:
        hello: the answer of this node's daemon.
        job: name of the job, as this rank knows it.

    Raises:
        ConfigError: the key can't be used.
    """
    if hello.job_token:
        return AGENTS_KEY, hello.job_token
    key = job_key.load(job_key_variables())
    return (key.mark, key.job_token(job)) if key is not None else ("", b"")


def make_secrets(tries: int, token: bytes = b"") -> JobSecrets:
    """Returns new secrets of a job.

    Args:
        tries: how many tries the attach has.
        token: the job's token, if that follows from a job key.
    """
    idents, lineage = secrets.token_bytes(IDENT_BYTES * tries), secrets.token_hex(LINEAGE_BYTES)
    return JobSecrets(idents, token or secrets.token_bytes(messages.TOKEN_BYTES), lineage)


def describe(
    context: AttachContext, introduction: Introduction, published: Sequence[bytes] | None = None
) -> Description:
    """Publishes symbolic tables, and makes the new manifest. All ranks call it together.

    Args:
        context: what every step needs.
        introduction: the facts of all ranks.
        published: what the ranks have published already, see `short_table`. The ranks exchange
            tables only if one is missing.

    Raises:
        AttachError: a rank could not take part.
    """
    ranks = introduction.ranks
    if published is None or not all(data for rank, data in enumerate(published) if ranks.describes(rank)):
        gathered = gather(context.rank_group, lambda: RankMessage(symbolic_table(introduction)), RankMessage)
        published = [each.data for each in gathered]
    new = manifest_of(context, introduction, published)
    return Description(new, division_of(layouts_of(new), inline_bytes_max(domains_of(new)), ()))


def symbolic_table(introduction: Introduction) -> bytes:
    """Returns the symbolic table that this rank publishes; empty if another rank has the same."""
    is_mine = introduction.ranks.describes(introduction.rank)
    return manifest.table_to(introduction.state.symbolic.table) if is_mine else b""


def short_table(introduction: Introduction) -> bytes:
    """Returns this rank's symbolic table if it may travel with other facts, else nothing."""
    table = symbolic_table(introduction)
    return table if len(table) <= SHORT_TABLE else b""


def compare(context: AttachContext, introduction: Introduction, description: Description) -> list[str]:
    """Returns the leaves whose replicas differ now. All ranks call it together.

    This reads all replicated bytes of every rank.

    Raises:
        AttachError: a rank could not take part.
    """
    names = layouts_of(description.manifest)[0].names
    return find_mismatched(context.rank_group, description.division, names, introduction.state.tensor_index)


def manifest_of(context: AttachContext, introduction: Introduction, published: Sequence[bytes]) -> pb.Manifest:
    """Returns the new manifest. Its number of slots is 0 if no rank asks for a number.

    Args:
        context: what every step needs.
        introduction: the facts of all ranks.
        published: the symbolic table that each rank published; see `RankTable.layouts`.
    """
    request, first = context.request, introduction.ranks.first
    tables, layouts, index = introduction.ranks.layouts(published)
    return pb.Manifest(
        job=introduction.job.id,
        named=introduction.job.named,
        token=introduction.ranks.secrets.token,
        job_mark=introduction.ranks.secrets.ident(0),
        world=len(introduction.ranks.infos),
        nodes=introduction.nodes,
        script=first.identity.script,
        every=request.every,
        launch=first.identity.launch,
        protect=request.protect,
        tolerate=-1 if request.tolerate is None else request.tolerate,
        chunk_bytes=context.settings.chunk_bytes,
        packed_tables=tables,
        layouts=layouts,
        layout_of=index,
        slots=introduction.ranks.fewest_slots,
        lineage=introduction.ranks.secrets.lineage if introduction.ranks.are_persisted else "",
    )
