"""The lines that attach prints once, for the user that started the job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from reft.client import torch_internals
from reft.client.attach.arguments import AttachArguments
from reft.client.schedule import hooks
from reft.client.state.extract.optimizers import OptimizerExtractor
from reft.client.state.extract.registry import extractor_of
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.budget import SLOTS, format_bytes
from reft.core.coding.placement import Exposure, Placement, exchange_cost, exposures
from reft.core.commit.version import Version
from reft.core.recovery.holdings import FRAME, fresh_start_block, replayed
from reft.core.recovery.recovery import RecoveryPlan
from reft.core.recovery.restart_loop import went_back
from reft.core.recovery.stripes import slot_name
from reft.core.status.protection import protection_counts
from reft.core.text import counted
from reft.wire.inventory import JobSurvey, StoredHistory
from reft.wire.v1 import daemon_pb2 as pb

NO_KEY = (
    "the rendezvous store holds a secret of this launch. Anyone who can read the store can act in the job's name, for example "
    "report its nodes as lost. To keep the secret out of the store, set REFT_JOB_KEY_FILE for torchrun: a file that only you "
    "can read, with the same 32 random bytes on every node."
)


def set_aside(version: Version | None, damaged: Sequence[int], world: int) -> str:
    """Returns the line about a version that can't be restored from these slots or capsules.

    Args:
        version: the damaged version.
        damaged: the ranks whose slots or capsules can't be used, and numbers of parity slots.
        world: number of ranks of the version.
    """
    names = ", ".join(slot_name(number, world) for number in damaged[:3])
    names += f" and {len(damaged) - 3} more" if len(damaged) > 3 else ""
    return f"{version} of {names} is damaged, or differs from its replicas: trying other copies, then an older version."


def replay_refused(version: Version | None, reasons: Sequence[str]) -> str:
    """Returns the line about replays that are not used; empty if none was refused."""
    return f"{version} can't be replayed: {reasons[0]} All ranks take an earlier step." if reasons else ""


def unusable_checkpoint(version: Version, damage: str) -> str:
    """Returns the line about a checkpoint that can't be used."""
    return f"the checkpoint of {version} is damaged, or was removed: {damage} Trying the one before."


def from_storage(job: str, base: Version, storage: StoredHistory) -> str:
    """Returns the block about a restore from storage: step, age, and what memory lacked."""
    return "\n".join([
        FRAME,
        f"job {job} GOES ON FROM STORAGE: {base}, written {storage.age_s:.0f} s ago.",
        f"  {storage.reason}",
        "Steps after that checkpoint are lost, and are trained again.",
        FRAME,
    ])  # fmt: skip


def restored(
    job: str, base: Version | None, source: str | None, manifest: pb.Manifest, job_survey: JobSurvey, plan: RecoveryPlan
) -> list[str]:
    """Returns lines about the restored version, its source, and newer versions not used."""
    lines = []
    size = f"{counted(manifest.world, 'rank')} on {counted(len(manifest.nodes), 'node')}"
    if base is None:
        if block := fresh_start_block(job, job_survey.inventory):
            lines.append(block)
        lines.append(f"job {job}: nothing held, starting fresh; {size}.")
        troubles = [trouble for reply in job_survey.replies.values() for trouble in reply.troubles]
        if troubles:
            more = f" And {counted(len(troubles) - 1, 'other rank')}." if len(troubles) > 1 else ""
            what, fix, remedy = troubles[0].partition("\nFix: ")
            lines.append(f"the run before held no whole step. {what}{more}{fix}{remedy}")
    else:
        if job_survey.storage is not None and job_survey.storage.version == base:
            lines.append(from_storage(job, base, job_survey.storage))
        lines.append(f"job {job}: restored {base} from {source}, {size}.")
        count = job_survey.inventory.restores
        if count is not None and count.goes_back and base.step < count.step:
            lines.append(went_back(count, base))
    if plan.capsules and base is not None:
        before = job_survey.manifests[base.epoch]
        lost = sorted({node.name for node in before.nodes for rank in node.ranks if rank in plan.capsules})
        lines.append(
            f"the state of ranks {sorted(plan.capsules)[:8]} on {', '.join(lost)} was decoded from the other nodes; "
            f"{'a later snapshot' if plan.sections else 'the next snapshot'} protects it again."
        )
    if plan.replays:
        lines.append(replayed(plan))
    if plan.parity and base is not None:
        sections = [rank for rank in plan.sections if rank not in plan.replays]
        holders = sorted({job_survey.names[held.node] for held in plan.parity.values()})
        lines.append(
            f"leaves that only ranks {sections[:8]} held came from parity of step {base.step} on "
            f"{', '.join(holders[:8])}."
        )
    for shortfall in plan.partial[:3]:
        ranks = ", ".join(map(str, shortfall.ranks[:8]))
        who = f"rank {ranks} does" if len(shortfall.ranks) == 1 else f"ranks {ranks} do"
        why = f"{who} not hold it" if shortfall.is_placed else "no daemon that answers knows how its bytes were placed"
        lines.append(f"{shortfall.version} was not used: {why}.")
    return lines


def reshaped(before: int, world: int, lines: Sequence[str]) -> list[str]:
    """Returns lines about a reshard: the old and the new number of ranks, and the ranks' own state.

    Args:
        before: number of ranks of the restored version.
        world: number of ranks now.
        lines: lines about state that belongs to single ranks.
    """
    return [f"the state of {counted(before, 'rank')} was resharded for {counted(world, 'rank')}.", *lines]


def earlier_runs(job_survey: JobSurvey, script: str) -> list[str]:
    """Returns lines on how to go on from an earlier run of this script.

    There are none unless the daemons hold such a run.
    """
    others = [other for reply in job_survey.replies.values() for other in reply.others]
    earlier = [other for other in others if other.HasField("newest") and other.script == script]
    if not earlier:
        return []
    last = min(earlier, key=lambda other: other.age_s)
    return [
        f"step {last.newest.step} of an earlier run, which ended {last.age_s:.0f} s ago, is held as job {last.job}. "
        f"To go on from it: REFT_JOB={last.job}"
    ]


def unnamed() -> str:
    """Returns the line about a job without a name that no agent restarts."""
    return 'this job has no name, so a later start can\'t go on from it; to name it: REFT_JOB=NAME, or job="NAME" in attach.'


def exchange(placement: Placement, nodes: Sequence[pb.Node]) -> list[str]:
    """Returns a line about the exchange: why there is one, and what it costs.

    Args:
        placement: the placement of the job.
        nodes: the nodes of the job.
    """
    cost = exchange_cost(placement, [node.ranks for node in nodes])
    if cost is None:
        return []
    counts = protection_counts(placement, 0)
    kinds = (("aec_bytes", "of replicas by codes; "), ("arc_bytes", "of replicas by copies; "))
    replicas = "".join(f"{format_bytes(counts[key])} {words}" for key, words in kinds if counts[key])
    what = "copies" if any(lane.is_copies for lane in placement.guard_lanes) else "parity"
    return [
        f"protected: {replicas}{format_bytes(cost.nbytes)} exist once, and {counted(cost.nodes, 'node')} exchange {what} of them "
        f"after whole steps: up to {format_bytes(cost.turn_bytes)} sent a turn and node, {format_bytes(cost.parity_bytes)} "
        f"of {what} a node, {placement.slots} slots a rank in place of {SLOTS}."
    ]


def exposure(placement: Placement) -> list[str]:
    """Returns a line about state that lost nodes take away.

    Returns none on a single node, which nothing can protect against its own loss, unless the user
    asked for that.
    """
    exposed = sorted(exposures(placement), key=lambda each: (_survives_a_loss(each), -each.nbytes))  # the worst first
    if not exposed or (len(set(placement.domains)) == 1 and not placement.tolerate):
        return []
    more = f" And {len(exposed) - 1} more: see reft-cli status." if len(exposed) > 1 else ""
    what = "partly protected" if _survives_a_loss(exposed[0]) else "not protected against a lost node"
    return [f"{what}: {exposed[0].what}{more}"]


def _survives_a_loss(exposure: Exposure) -> bool:
    return exposure.reason in ("few domains", "exchange")


def not_covered(request: AttachArguments, tracked: TrackedObjects, world: int) -> list[str]:
    """Returns lines about state that a restart would not restore, and about reasons to differ."""
    lines = torch_internals.notices(tracked.modules.values(), tracked.optimizers, request.schedule)
    if isinstance(request.schedule, hooks.PIPELINES):
        lines.append("the schedule is only a description: copies use the gaps that the loop marks with session.idle().")
    if regroups(tracked, world):
        lines.append(
            "DDP regroups its gradients after a process's first backward pass, so steps after a restart may differ in the "
            "last bits; find_unused_parameters=True keeps the grouping."
        )
    for kind in sorted({kind for module in tracked.modules.values() for kind in _states_of_hooks(module)}):
        lines.append(
            f"not covered: the {kind} of DDP's communication hook (its error feedback, its random numbers): steps after a "
            "restart differ from those of an uninterrupted run."
        )
    for kind in sorted({type(each).__name__ for each in tracked.optimizers if _adds_to_its_state(each)}):
        lines.append(
            f"not covered: anything that {kind}.state_dict adds to torch's; keep it in the state of a parameter or in a "
            "parameter group to restore it too."
        )
    if request.forgets_scheduler():
        lines.append("not covered: the LR scheduler of an optimizer; pass it in state= to restore it too.")
    if unheld := _unheld(tracked):
        lines.append(
            f"{counted(len(unheld), 'trainable parameter')} in no optimizer that was passed, e.g. {unheld[0]}: if another "
            "optimizer trains them, pass it too, optimizer=[...]; else its state is not held, and its steps do not wait for "
            "copies."
        )
    return lines


def _unheld(tracked: TrackedObjects) -> list[str]:
    """Returns the trainable parameters of the models that no passed optimizer has.

    Returns none if an optimizer is not torch's, or if no optimizer has any of the parameters: then
    the optimizer has copies of the parameters in another precision.
    """
    if not all(isinstance(each, torch.optim.Optimizer) for each in tracked.optimizers):
        return []
    held = {
        id(each) for optimizer in tracked.optimizers for group in optimizer.param_groups for each in group["params"]
    }
    models = [named for named in tracked.parameters() if named.name.startswith("model.") and named.tensor.requires_grad]
    unheld = [named.name for named in models if id(named.tensor) not in held]
    return unheld if len(unheld) < len(models) else []


def _states_of_hooks(module: nn.Module) -> list[str]:
    """Returns the type names of the state of DDP's communication hooks, without process groups."""
    if not isinstance(module, nn.parallel.DistributedDataParallel):
        return []
    states = torch_internals.hook_states(module)
    return [type(each).__name__ for each in states if each is not None and not isinstance(each, ProcessGroup)]


def _adds_to_its_state(optimizer: Any) -> bool:
    """Decides whether an optimizer has its own `state_dict`, and no registered extractor."""
    is_known = type(extractor_of(optimizer)) is not OptimizerExtractor
    return not is_known and type(optimizer).state_dict is not torch.optim.Optimizer.state_dict


def regroups(tracked: TrackedObjects, world: int) -> bool:
    """Decides whether DDP adds gradients in an order that depends on the process's first step."""
    return world > 2 and any(
        isinstance(each, nn.parallel.DistributedDataParallel) and not each.find_unused_parameters
        for each in tracked.modules.values()
    )
