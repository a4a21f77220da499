"""The steps decide, open, load and lease: slots ─► live tensors, and slots for the next snapshots.

registration   one rank a node: store the decision. An error in all that follows undoes it
restore        every rank: this process is the rank's trainer; the base's slots ─► live tensors and
               host state. Meanwhile one rank a node: the base's capsules go to their holders again
lease          every rank: slots for the next snapshots, every page touched. The daemon frees slots
               of older versions for them
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

from reft.client.attach import report
from reft.client.attach.arguments import AttachContext
from reft.client.attach.introduce import Introduction
from reft.client.attach.plan import AttachPlan, decide, slots_of
from reft.client.link.exchange import together
from reft.client.link.slots import ALLOCATION_BYTES_PER_S, MappedSlot, SlotLeases
from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.restore.decode import decoder_for
from reft.client.restore.opened import RestoreContext
from reft.client.restore.remote_slots import RemoteSlots, SlotOpener
from reft.client.restore.reshard import ShapeChange, leaves_by_rank
from reft.client.restore.restore import Restore, RestoreResult, run_restore
from reft.client.restore.transport import Transport, transport_of
from reft.console import say
from reft.errors import ReftError
from reft.wire import messages
from reft.wire.inventory import JobSurvey
from reft.wire.v1 import daemon_pb2 as pb


@contextlib.contextmanager
def registration(
    context: AttachContext, introduction: Introduction, plan: AttachPlan, leases: SlotLeases
) -> Iterator[None]:
    """Stores the decision. An error undoes it, and what was registered, on every node.

    `restore` registers each rank as trainer, once all nodes have the decision.

    Args:
        context: what every step needs.
        introduction: the ranks and nodes that take part.
        plan: the decision.
        leases: the leases of this rank, from `leases_of`.

    Raises:
        ReftError: a daemon refused the decision.
    """
    try:
        decide(context, introduction, plan)
        yield
    except BaseException:
        with contextlib.suppress(ReftError):  # the first error counts
            leases.release(is_refused=True)
        raise


def leases_of(context: AttachContext, introduction: Introduction, plan: AttachPlan) -> SlotLeases:
    """Returns the leases of this rank under the plan's epoch; registers nothing."""
    daemon, device = introduction.daemon, introduction.state.device
    return SlotLeases(
        address=daemon.address,
        socket_path=daemon.hello.local_socket,
        job=introduction.job.id,
        epoch=plan.decision.epoch,
        rank=context.rank,
        settings=replace(context.settings, slots=slots_of(context.settings, plan.manifest)),
        under_agent=context.launch.under_agent,
        pins_for=device if device.type == "cuda" else None,
        calls=context.calls,
    )


def remote_slots(context: AttachContext, introduction: Introduction, survey: JobSurvey) -> RemoteSlots:
    """Returns the reader of this job's slots, through this node's daemon."""
    nodes = {**survey.nodes, **{node.id: node for node in introduction.nodes}}
    deadline_s = context.settings.attach_deadline_s
    daemon, own = introduction.daemon.address, introduction.node.id
    return RemoteSlots(introduction.job.id, daemon, own, nodes, deadline_s, context.calls, tuple(survey.tokens))


def restore(
    context: AttachContext,
    introduction: Introduction,
    plan: AttachPlan,
    leases: SlotLeases,
    buffer: HugePageBuffer,
    capsules: Mapping[int, pb.CapsuleRecord],
) -> RestoreResult:
    """Registers each rank as trainer, and restores the base, if there is one.

    All ranks call it together.

    Args:
        context: what every step needs.
        introduction: the ranks and nodes that take part.
        plan: the base, and where each rank's part of it is found.
        leases: registers this rank; maps slots of this node.
        buffer: memory for tensors to create.
        capsules: old rank → its capsule at the base, as far as this rank has read them.

    Raises:
        ReftError: a rank can't be registered, for example because another trainer lives; or a
            holder does not keep the base's capsules.
        LayoutChanged: the state does not fit.
        RestoreError: bytes are not available, or decoded bytes differ from the saved ones.
    """
    if plan.base is None:
        together(context.rank_group, leases.register)
        return RestoreResult()
    settings, group, device = context.settings, context.rank_group.group, introduction.state.device
    facts = {"rank": context.rank, "epoch": plan.decision.epoch.counter}

    made: list[Transport] = []

    def transport() -> Transport | None:
        if group is None:
            return None
        made.append(transport_of(settings.load_transport, group, device, settings.attach_deadline_s))
        return made[-1]

    def at_chunk(chunk: int) -> None:
        context.failpoints.hit("restore.chunk", chunk=chunk, **facts)

    def secure_base() -> contextlib.AbstractContextManager[None]:
        return sent_capsules(introduction, plan)

    with contextlib.closing(SlotOpener(leases, remote_slots(context, introduction, plan.survey), capsules)) as opener:
        steps = restore_steps(context, introduction, plan, opener, buffer)
        result = run_restore(steps, context.rank_group, transport, at_chunk, leases.register, secure_base)
    for each in made:  # after an error ranks may still wait for messages, and the process ends
        each.close()
    return result


def restore_steps(
    context: AttachContext,
    introduction: Introduction,
    plan: AttachPlan,
    opener: SlotOpener,
    buffer: HugePageBuffer,
) -> Restore:
    """Returns the steps of a restore into the same shape, or into another one."""
    base, before, state = plan.base, plan.base_manifest, introduction.state
    assert base is not None and before is not None, "a restore has a base"
    layouts, index = plan.survey.layouts[base.epoch]
    restore_context = RestoreContext(
        plan=plan.recovery,
        placement=plan.survey.placements[base.epoch],
        names=[layouts.name_table(i) for i in index],
        rank=context.rank,
        nodes=introduction.ranks_by_node,
        opener=opener,
        tracked=state.tracked,
        tensor_index=state.tensor_index,
        host=state.host,
        buffer=buffer,
        decoder=decoder_for(state.device, context.settings.parity_scratch_bytes),
        device=state.device,
        failpoints=context.failpoints,
    )
    if plan.is_reshaped:
        change = ShapeChange(leaves_by_rank(before), leaves_by_rank(plan.manifest), before.mismatched)
        return Restore(restore_context, change=change)
    return Restore(restore_context, layouts[index[context.rank]].leaves)


def give_up(context: AttachContext, plan: AttachPlan, leases: SlotLeases, result: RestoreResult) -> None:
    """Ends the registration of all ranks after a damaged base. All ranks call it together.

    The next inventory must not find a rank that is still registered. The decision for the damaged
    base is undone.

    Args:
        context: what every step needs.
        plan: the plan with the damaged base.
        leases: the registration of this rank.
        result: the ranks whose slots or capsules were damaged, or the refused replays.
    """
    if context.rank == 0:
        world = plan.base_manifest.world if plan.base_manifest else 0
        refused = report.replay_refused(plan.base, result.reasons)
        say(refused or report.set_aside(plan.base, result.damaged, world))
    together(context.rank_group, lambda: leases.release(is_refused=True))


def secure(context: AttachContext, introduction: Introduction, plan: AttachPlan) -> None:
    """Sends the base's capsules to their holders again. All ranks call it together.

    A re-attach loads nothing. So this is a step of its own there.

    Raises:
        ReftError: a holder does not keep the capsules.
    """

    def act() -> None:
        with sent_capsules(introduction, plan):
            pass

    together(context.rank_group, act)


@contextlib.contextmanager
def sent_capsules(introduction: Introduction, plan: AttachPlan) -> Iterator[None]:
    """Has this node's daemon send the base's capsules to their holders, while the block runs.

    Only the rank that speaks for the node asks for it. It must be done on all nodes before the
    first lease: the daemons free older versions then. On a single node there is no holder.

    Raises:
        ReftError: a holder does not keep the capsules.
    """
    if introduction.is_leader and plan.base is not None and len(introduction.nodes) > 1:
        request = pb.SecureRequest(job=introduction.job.id, epoch=messages.epoch_to(plan.decision.epoch))
        with introduction.daemon.begun("Secure", request):
            yield
    else:
        yield


def lease(context: AttachContext, introduction: Introduction, plan: AttachPlan, leases: SlotLeases) -> list[MappedSlot]:
    """Returns the slots for the next snapshots. All ranks call it together.

    The small host state is checked here, and not before the restore. An object of the user whose
    `state_dict` is called first may ignore `load_state_dict` afterwards, as torchdata's
    `nodes.Loader` does.

    Raises:
        UnsupportedState: a capsule can't hold the small host state.
        NoRoom: the slots don't fit into memory.
    """
    data_bytes = plan.placement.rank_placement(context.rank).unplanned_offset
    all_bytes = data_bytes * slots_of(context.settings, plan.manifest) * context.rank_group.world

    def act() -> list[MappedSlot]:
        introduction.state.host.check_size(introduction.state.names)
        return leases.lease(data_bytes, len(introduction.state.table))

    return together(context.rank_group, act, extra_s=all_bytes / ALLOCATION_BYTES_PER_S)
