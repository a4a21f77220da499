"""What attach says to the person who started the job, once: lines of plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from reft.client.attach.arguments import AttachArguments
from reft.client.schedule import hooks
from reft.client.state.extract.optimizers import OptimizerExtractor
from reft.client.state.extract.registry import extractor_of
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.coding.placement import Placement, exposed
from reft.core.commit.version import Version
from reft.core.recovery.recovery import RecoveryPlan, describe
from reft.core.text import counted
from reft.wire.inventory import JobSurvey
from reft.wire.v1 import daemon_pb2 as pb


def set_aside(version: Version | None, damaged: Sequence[int]) -> str:
    """That a version is not restored as it was found.

    Args:
        damaged: the ranks whose slots or capsules can't be used.
    """
    ranks = ", ".join(map(str, damaged[:3])) + (f" and {len(damaged) - 3} more" if len(damaged) > 3 else "")
    return (
        f"{version} of rank {ranks} is damaged, or not what its replicas hold: looking for it elsewhere, else going back to an "
        "older one."
    )


def lost(job: str, job_survey: JobSurvey, plan: RecoveryPlan, erased: Iterable[tuple[str, str, Any]]) -> str:
    """Why a job that had a whole version has none now.

    Args:
        job: its name.
        job_survey: what all daemons said.
        plan: without a base.
        erased: node id, slot and version of what was found damaged.
    """
    names = {node.id: node.name for manifest in job_survey.manifests.values() for node in manifest.nodes}
    parts = []
    for shortfall in plan.partial[:1]:
        epoch = shortfall.version.epoch
        manifest = job_survey.manifests.get(epoch, pb.Manifest())
        places = {rank: node.name for node in manifest.nodes for rank in node.ranks}
        parts += describe(shortfall, job_survey.placements.get(epoch), places)
    parts += [f"{version} on node {names.get(node, node)} is damaged." for node, _, version in sorted(erased, key=str)]
    parts += [f"Node {name} does not answer." for name in job_survey.silent]
    return f"job {job} was held whole, but no version is whole now: {' '.join(parts) or 'no slots are left.'}"


def restored(
    job: str, base: Version | None, source: str | None, manifest: pb.Manifest, job_survey: JobSurvey, plan: RecoveryPlan
) -> list[str]:
    """What was restored from where, and which newer versions could not be."""
    lines = []
    where = f"{counted(manifest.world, 'rank')} on {counted(len(manifest.nodes), 'node')}"
    if base is None:
        lines.append(f"job {job}: nothing held, starting fresh; {where}.")
    else:
        lines.append(f"job {job}: restored {base} from {source}, {where}.")
    if plan.capsules and base is not None:
        before = job_survey.manifests[base.epoch]
        lost = sorted({node.name for node in before.nodes for rank in node.ranks if rank in plan.capsules})
        lines.append(
            f"what ranks {sorted(plan.capsules)[:8]} held on {', '.join(lost)} was decoded from the other nodes; "
            "the next snapshot protects it again."
        )
    for shortfall in plan.partial[:3]:
        ranks = list(shortfall.ranks)[:8]
        lines.append(f"{shortfall.version} was not used: ranks {ranks} do not hold it.")
    return lines


def reshaped(before: int, world: int, lines: Sequence[str]) -> list[str]:
    """That the state was held in another shape, and what was done with what is each rank's own."""
    return [f"the state of {counted(before, 'rank')} was brought into a job of {world}, by what each leaf is.", *lines]


def earlier_runs(job_survey: JobSurvey, script: str) -> list[str]:
    """How to go on from an earlier run of this script, if one is held."""
    others = [other for reply in job_survey.replies.values() for other in reply.others]
    earlier = [other for other in others if other.HasField("newest") and other.script == script]
    if not earlier:
        return []
    last = min(earlier, key=lambda other: other.age_s)
    return [
        f"step {last.newest.step} of an earlier run, which ended {last.age_s:.0f} s ago, is held as job {last.job}. "
        f"To go on from it: REFT_JOB={last.job}"
    ]


def exposure(placement: Placement) -> list[str]:
    """What a lost node would take with it."""
    found = exposed(placement)
    if not found:
        return []
    more = f" And {len(found) - 1} more: see reft-cli status." if len(found) > 1 else ""
    return [f"not protected against a lost node: {found[0].what}{more}"]


def not_covered(request: AttachArguments, tracked: TrackedObjects, world: int) -> list[str]:
    """What a restart would not bring back, and what would make it differ."""
    lines = []
    if isinstance(request.schedule, hooks.PIPELINES):
        lines.append(
            "the schedule is only described: copies go into the idle times that the loop marks with session.idle()."
        )
    if world > 2 and any(_regroups(module) for module in tracked.modules.values()):
        lines.append(
            "DDP regroups its gradients after a process's first backward pass, so steps after a restart may differ in their "
            "last bits; find_unused_parameters=True keeps the grouping."
        )
    for kind in sorted({kind for module in tracked.modules.values() for kind in _states_of_hooks(module)}):
        lines.append(
            f"not covered: the {kind} of DDP's communication hook (errors it feeds back, its own random numbers): steps after a "
            "restart differ from those of a run that was not stopped."
        )
    for kind in sorted({type(each).__name__ for each in tracked.optimizers if _adds_to_its_state(each)}):
        lines.append(
            f"not covered: what {kind}.state_dict adds to torch's, if anything; keep it in the state of a parameter or in a "
            "parameter group to bring it back too."
        )
    uncovered = request.uncovered()
    if uncovered:
        lines.append(f"not covered: {' and '.join(uncovered)}; pass them in state= to bring them back too.")
    if unheld := _unheld(tracked):
        lines.append(
            f"{counted(len(unheld), 'trainable parameter')} in no optimizer that was passed, e.g. {unheld[0]}: if there is one, "
            "pass it too, optimizer=[...], else its state is not held, and its steps are not waited for."
        )
    return lines


def _unheld(tracked: TrackedObjects) -> list[str]:
    """Parameters of the models that require gradients and that no optimizer has, as far as that can be told.

    Not where an optimizer is another library's, or has copies of the parameters in another precision.
    """
    if not all(isinstance(each, torch.optim.Optimizer) for each in tracked.optimizers):
        return []
    held = {
        id(each) for optimizer in tracked.optimizers for group in optimizer.param_groups for each in group["params"]
    }
    models = [named for named in tracked.parameters() if named.name.startswith("model.") and named.tensor.requires_grad]
    found = [named.name for named in models if id(named.tensor) not in held]
    return found if len(found) < len(models) else []


def _states_of_hooks(module: nn.Module) -> list[str]:
    """The kinds of state that communication hooks of DDP keep; a process group is none."""
    if not isinstance(module, nn.parallel.DistributedDataParallel):
        return []
    states = [state for _, state in getattr(module, "_comm_hooks", ())]
    return [type(each).__name__ for each in states if each is not None and not isinstance(each, ProcessGroup)]


def _adds_to_its_state(optimizer: Any) -> bool:
    """Whether it is an optimizer of somebody's own, with a `state_dict` of its own, and nobody told how to hold it."""
    is_known = type(extractor_of(optimizer)) is not OptimizerExtractor
    return not is_known and type(optimizer).state_dict is not torch.optim.Optimizer.state_dict


def _regroups(module: nn.Module) -> bool:
    """Whether the order in which gradients are added depends on where the process began."""
    return isinstance(module, nn.parallel.DistributedDataParallel) and not module.find_unused_parameters
