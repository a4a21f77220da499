"""reft keeps the training state of every step in the memory of the nodes.

session = reft.attach(model, optimizer, state={"lr": scheduler})
for step in session.steps(total):
    ...
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from reft.errors import ReftError

if TYPE_CHECKING:
    from reft.client.data.loader import ResumableLoader
    from reft.client.session import Session
    from reft.client.state.values import Values
    from reft.config import Config

__version__ = "0.1.0"
__all__ = ["ReftError", "ResumableLoader", "Session", "Values", "__version__", "attach"]


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
    """Protects a training job, and restores its state if this is a restart.

    Call it on every rank.

    Args:
        model: the nn.Module, or a list of modules: plain, DDP, FSDP, HSDP, TP, EP (DTensors of any
            mesh).
        optimizer: the optimizer, or a list of optimizers; ZeroRedundancyOptimizer works too. For
            any other kind pass the outermost object, and tell `reft.client.register_extractor`
            first how to find the state of that object.
        schedule: None, or a pipeline schedule (`reft.schedules`).
        state: name → any other object that belongs to the state and has state_dict and
            load_state_dict: the LR scheduler, the data loader (`ResumableLoader`), a GradScaler, an
            average of the weights, a torch.Generator, the loop's own values (`reft.Values`).
        tolerate: number of failure domains that may be lost at once. A failure domain is a node, or
            a rack where racks were named. None chooses by the number of domains that hold the same
            state: 0 for a single one, 1 for 2 to 5, 2 from 6 on. The most is all domains but one; a
            larger number is reduced to that.
        protect: how to protect state that several nodes hold: "arc" (copies), "aec" (erasure
            codes), "auto" (chooses by size), or "none" (each rank keeps only its own state, and the
            state of a lost node is lost). "aor", or "auto" if it keeps up, recomputes torch's ZeRO.
        every: take a snapshot after every n-th step. None means every step. "auto" measures the
            cost of snapshots and takes them as `Config.overhead_budget` and `Config.mtbf_s` allow;
            all ranks agree on the interval while they train.
        slots: number of snapshots to hold for each rank; None means 3, or 4 with an exchange.
        job: name of the job; None means REFT_JOB, else torchrun's --rdzv-id, else Slurm's job id,
            else a name for this launch alone.
        daemon: address of this node's daemon, unix:PATH or host:port. None means REFT_DAEMON, else
            this user's own daemon, which attach starts if it does not run.
        config: all further settings (`reft.config.Config`). A setting that was not passed to Config
            is read from the environment.

    Returns:
        The session. `session.step` is the number of completed steps; 0 after a fresh start.

    Raises:
        reft.errors.AttachError: attach failed, on every rank; the message names cause and remedy.
        reft.errors.RestoreError: a snapshot exists, but can't be restored.
        reft.errors.ConfigError: an argument can't be used.
    """
    from reft.client.attach.api import attach as attach_client

    return attach_client(
        model, optimizer, schedule, state=state, tolerate=tolerate, protect=protect, every=every, slots=slots, job=job,
        daemon=daemon, config=config,
    )  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports a class or a public module at first use, since most load torch."""
    if name == "Session":
        from reft.client.session import Session

        return Session
    if name == "ResumableLoader":
        from reft.client.data.loader import ResumableLoader

        return ResumableLoader
    if name == "Values":
        from reft.client.state.values import Values

        return Values
    if name in ("client", "config", "integrations", "schedules"):
        return import_module(f"reft.{name}")
    raise AttributeError(f"module 'reft' has no attribute {name!r}")
