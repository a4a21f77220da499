"""The options of --rdzv-conf with their defaults, and the job of an agent."""

from __future__ import annotations

import hashlib
import os
import pwd
import sys
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters

from reft.config import Config
from reft.core.membership.job_identity import NO_RUN_ID, JobIdentity, identify
from reft.errors import ConfigError

# name → (default, meaning). Numbers are seconds; keep_alive_max_attempt is a count. torch reads the
# first six options. reft reads all others, also those that torch's own backends know.
# Here a round is a rendezvous round: one start of all workers. The daemons' rounds are others. An
# agent is the torchrun process of a node.
OPTIONS: dict[str, tuple[Any, str]] = {
    "join_timeout": (600, "time within which a rendezvous round must complete"),
    "last_call_timeout": (30, "time that a job's first round waits for more nodes than the minimum of --nnodes"),
    "close_timeout": (30, "time within which the end of the job must be written to the store"),
    "heartbeat_timeout": (5, "time within which an agent's sign of life must be written to the store"),
    "keep_alive_interval": (5, "time between two signs of life (keep-alives) of one agent"),
    "keep_alive_max_attempt": (3, "intervals without a keep-alive after which an agent is removed"),
    "read_timeout": (60, "time that a call of the store may take"),
    "is_host": (None, "whether the store runs on this host; default: if the endpoint names this host"),
    "shrink_timeout": (5, "time that each round after a restart waits for more nodes than the minimum"),
    "store_idle_exit": (120, "time after the last keep-alive until the store's process exits"),
    "warm": ("no", "yes: workers are forked from a warm process, see Restart speed in elastic/README.md"),
    "warm_imports": ("", "modules that the warm process imports beside torch and reft, joined by +"),
    "daemon": ("auto", "auto: a reft-daemon is started on this node if none runs; off: no daemon"),
    "etcd_ttl": (3600, "time that etcd keeps a job's keys after the last use"),
    "ca_cert": ("", "etcd: file with the CA certificate; switches to https"),
    "ssl_cert": ("", "etcd: file with the client certificate"),
    "ssl_cert_key": ("", "etcd: file with the key of the client certificate"),
    "etcd_user": ("", "etcd: name of a user; the password is in REFT_ETCD_PASSWORD"),
}
NUMBER_MAX = 10**9  # seconds, or a count; torch fails with much larger ones
# torchrun adds these two to every rendezvous. reft is built on torch's dynamic rendezvous, which
# uses neither.
TORCHS_OWN = ("timeout", "rank")


def check(parameters: RendezvousParameters) -> None:
    """Checks the options of --rdzv-conf.

    Raises:
        ConfigError: an option is unknown or its value is not valid.
    """
    unknown = sorted(set(parameters.config) - set(OPTIONS) - set(TORCHS_OWN))
    if unknown:
        raise ConfigError(
            f"--rdzv-conf has options that the reft backend does not know: {', '.join(unknown)}.",
            f"use {', '.join(OPTIONS)}",
        )
    for name, (default, _) in OPTIONS.items():
        if isinstance(default, int) and not 0 < number(parameters, name) <= NUMBER_MAX:
            raise ConfigError(
                f"--rdzv-conf {name}={number(parameters, name)} must be above 0, and at most {NUMBER_MAX}.",
                f"{name}={default} is the default",
            )
    for name in ("warm", "is_host"):
        truth(parameters, name)


def number(parameters: RendezvousParameters, name: str) -> int:
    """Returns an option that is a whole number.

    Raises:
        ConfigError: the value is not a whole number.
    """
    text = str(parameters.get(name, OPTIONS[name][0]))
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"--rdzv-conf {name}={text} is not a whole number.") from error


def truth(parameters: RendezvousParameters, name: str) -> bool:
    """Returns an option that is yes or no, in any spelling that torch accepts.

    Raises:
        ConfigError: the value is neither.
    """
    try:
        return bool(parameters.get_as_bool(name, OPTIONS[name][0]))
    except ValueError as error:
        message = f"--rdzv-conf {name}={parameters.get(name)} is neither yes nor no."
        raise ConfigError(message, "yes, no, true, false, 1 or 0") from error


def text(parameters: RendezvousParameters, name: str) -> str:
    """Returns an option as text."""
    return str(parameters.get(name, OPTIONS[name][0])).strip()


def rendezvous_id(run_id: str, slurm_job: str, script: str) -> str:
    """Returns the id under which this job's agents meet in the store.

    The id holds no launch: agents that start separately must find each other before there is one.
    Daemons and trainers use another name, see `job_of`.

    Args:
        run_id: torchrun's --rdzv-id.
        slurm_job: SLURM_JOB_ID.
        script: the script of the job, the same on all nodes.
    """
    if run_id not in NO_RUN_ID:
        return f"id.{run_id}"
    if slurm_job:
        return f"slurm.{slurm_job}"
    user = pwd.getpwuid(os.getuid()).pw_name
    return f"script.{user}.{hashlib.blake2b(script.encode(), digest_size=8).hexdigest()}"


def script_of(argv: list[str]) -> str:
    """Returns the script of an agent's command line; without torchrun, the agent's program."""
    from torch.distributed.run import get_args_parser

    # run.py: python -m torch.distributed.run. agent.py: torchrun for tests, tests/support/agent.py.
    name = Path(argv[0]).name
    if name not in ("torchrun", "run.py", "agent.py"):
        return argv[0]
    options = get_args_parser().parse_known_args(argv[1:])[0]
    return f"{'-m ' if options.module else ''}{options.training_script}"


def rendezvous_id_of(run_id: str) -> str:
    """Returns `rendezvous_id` for this process."""
    return rendezvous_id(run_id, os.environ.get("SLURM_JOB_ID", ""), script_of(sys.argv))


def job_of(run_id: str, launch: str) -> JobIdentity:
    """Returns the identity that daemons and trainers use for this job.

    Args:
        run_id: torchrun's --rdzv-id.
        launch: id of this launch. The first agent makes it; it stays the same after restarts. Two
            launches of an unnamed job are two jobs.
    """
    return identify(
        chosen=Config.load().job,
        run_id=run_id,
        slurm_job=os.environ.get("SLURM_JOB_ID", ""),
        script=script_of(sys.argv),
        user=os.getuid(),
        launch=launch,
    )
