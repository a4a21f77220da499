"""Which job a process belongs to, and whether it is the same job as one that is held.

A job is *named* if somebody gave it a name: `job=`, REFT_JOB, torchrun's --rdzv-id, or Slurm's job id. A named job finds
its state again whenever it is started. A job without a name is one launch of one script: restarts of its workers by the
agent that started them find the state, a plain second run starts fresh.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from reft.errors import ConfigError

JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NO_RUN_ID = ("", "none")  # torchrun's own default for --rdzv-id is the word none, for every job of the machine


@dataclass(frozen=True)
class JobIdentity:
    """A job's id, which is also the name of its folder in the arena, and whether somebody chose it."""

    id: str
    named: bool


def check_name(name: str) -> str:
    """The name itself.

    Raises:
        ConfigError: it could not be a folder, or has more than 64 characters.
    """
    if not JOB_NAME.fullmatch(name):
        raise ConfigError(
            f"job name {name!r} is not allowed: 1 to 64 letters, digits, dots, dashes and underscores, "
            "beginning with a letter or digit."
        )
    return name


def identify(
    *, chosen: str, run_id: str, slurm_job: str, script: str, user: int, launch: str, unnamed: str = ""
) -> JobIdentity:
    """The job that a process belongs to.

    Args:
        chosen: from `job=` or REFT_JOB.
        run_id: torchrun's --rdzv-id as its workers see it.
        slurm_job: SLURM_JOB_ID.
        script: path of the training script.
        user: uid of the trainer.
        launch: what tells one launch of the script from the next; the same on all ranks and after a restart by an agent.
        unnamed: what reft's rendezvous calls the job if nobody has named it; empty under any other.

    Raises:
        ConfigError: the chosen name is not allowed.
    """
    if chosen:
        return JobIdentity(check_name(chosen), True)
    if run_id not in NO_RUN_ID:
        return JobIdentity(_as_name(run_id), True)
    if slurm_job:
        return JobIdentity(_as_name(f"slurm-{slurm_job}"), True)
    if unnamed:
        return JobIdentity(check_name(unnamed), False)
    stem = re.sub(r"[^A-Za-z0-9]+", "-", script.rpartition("/")[2].removesuffix(".py")).strip("-") or "script"
    mark = hashlib.blake2b(f"{user}\0{script}\0{launch}".encode(), digest_size=4).hexdigest()
    return JobIdentity(f"{stem[:40]}-{mark}", False)


def _as_name(text: str) -> str:
    """A launcher's id as a name: kept if allowed, else its allowed part and a digest, so that two never meet."""
    if JOB_NAME.fullmatch(text):
        return text
    kept = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:40] or "job"
    return f"{kept}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
