"""Decides which job a process belongs to.

A job is *named* if a person or a launcher gave it a name: `job=`, REFT_JOB, torchrun's --rdzv-id,
or Slurm's job id. A named job finds its state again whenever it is started. A job without a name is
one launch of one script. Workers that its agent restarts find the state. A plain second run starts
fresh.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from reft.errors import ConfigError

JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NO_RUN_ID = ("", "none")  # "none" is torchrun's default for --rdzv-id, for every job of the machine


@dataclass(frozen=True)
class JobIdentity:
    """A job's id, and whether a person or a launcher chose it.

    The id is also the name of the job's folder in the arena.
    """

    id: str
    named: bool


def check_name(name: str) -> str:
    """Returns the name, if it is allowed.

    Raises:
        ConfigError: the name could not be a folder, or has more than 64 characters.
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
    """Returns the job that a process belongs to.

    Args:
        chosen: from `job=` or REFT_JOB.
        run_id: torchrun's --rdzv-id as its workers see it.
        slurm_job: SLURM_JOB_ID.
        script: path of the training script.
        user: uid of the trainer.
        launch: distinguishes two launches of the script; the same on all ranks and after a restart
            by an agent.
        unnamed: name that reft's rendezvous gives to an unnamed job; empty under any other
            rendezvous.

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
    """Turns a launcher's id into an allowed name.

    An allowed id is kept. Otherwise the name is its allowed part and a digest, so that two ids
    never get one name.
    """
    if JOB_NAME.fullmatch(text):
        return text
    allowed_part = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:40] or "job"
    return f"{allowed_part}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
