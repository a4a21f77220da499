"""reft: the training state of every step, in the memory of the nodes themselves.

session = reft.attach(model, optimizer, state={"lr": scheduler})
for step in session.steps(total):
    ...
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reft.errors import ReftError

if TYPE_CHECKING:
    from reft.client.session import Session
    from reft.config import Config

__version__ = "0.1.0"
__all__ = ["ReftError", "Session", "__version__", "attach"]


def attach(
    model: Any,
    optimizer: Any,
    schedule: Any = None,
    *,
    state: Mapping[str, Any] | None = None,
    tolerate: int | None = None,
    protect: str = "auto",
    every: int | str | None = None,
    slots: int | None = None,
    job: str | None = None,
    daemon: str | None = None,
    config: Config | None = None,
) -> Session:
    """Protects a training job from here on, and brings its state back if this is a restart. Call it on every rank.

    Args:
        model: the nn.Module, or a list of them: plain, DDP, FSDP, HSDP, TP, EP (DTensors of any mesh).
        optimizer: the optimizer, or a list of them; ZeroRedundancyOptimizer too. What else there is: the outermost object,
            once `reft.client.register_extractor` was told how to find its state.
        schedule: None, or a pipeline schedule (`reft.schedules`).
        state: name → anything else that belongs to the state and has state_dict and load_state_dict: the LR scheduler, the
            data loader, a GradScaler, a module such as an average of the weights, a torch.Generator.
        tolerate: failure domains (nodes, or racks where they were named) that may be lost at once; None means 1 where 2 to 5
            of them hold the same state, 2 from 6 on, 0 on a single node; more than all but one is cut to that.
        protect: how state that several nodes hold is kept: "arc" (copies), "aec" (erasure codes), "auto" (by size), or
            "none" (each rank keeps its own, and a lost node's is lost).
        every: a snapshot after each n-th step; None means each step; "auto" as often as `Config.overhead_budget` and
            `Config.mtbf_s` allow, by what snapshots are measured to cost: all ranks agree on it while they train.
        slots: snapshots to hold for each rank; None means 3.
        job: name of the job; None means REFT_JOB, torchrun's --rdzv-id, Slurm's job id, or this launch alone.
        daemon: address of this node's daemon, unix:PATH or host:port; None means REFT_DAEMON, else this user's own, which
            is started if it does not run.
        config: all further settings (`reft.config.Config`); what it was not given is read from the environment.

    Returns:
        The session; `session.step` is the number of completed steps, 0 on a fresh start.

    Raises:
        reft.errors.AttachError: attach can't go on, on every rank alike; the message names cause and remedy.
        reft.errors.RestoreError: state is held, but can't be brought back.
        reft.errors.ConfigError: an argument can't be used.
    """
    from reft.client.attach.api import attach as attach_client

    return attach_client(
        model, optimizer, schedule, state=state, tolerate=tolerate, protect=protect, every=every, slots=slots, job=job,
        daemon=daemon, config=config,
    )  # fmt: skip


def __getattr__(name: str) -> Any:
    """`reft.Session`, found when asked for, because it loads torch."""
    if name == "Session":
        from reft.client.session import Session

        return Session
    raise AttributeError(f"module 'reft' has no attribute {name!r}")
