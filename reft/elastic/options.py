"""What --rdzv-conf may say, with its defaults; and which job an agent belongs to."""

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

# name → (default, what it is). Seconds where nothing else is said. torch reads those of the first group itself.
OPTIONS: dict[str, tuple[Any, str]] = {
    "join_timeout": (600, "within which a round must complete"),
    "last_call_timeout": (30, "for which the first round waits for more nodes than the fewest of --nnodes"),
    "close_timeout": (30, "within which the end of the job must be written"),
    "heartbeat_timeout": (5, "within which a sign of life must be written"),
    "keep_alive_interval": (5, "between signs of life of an agent"),
    "keep_alive_max_attempt": (3, "intervals of silence after which an agent is forgotten"),
    "read_timeout": (60, "that a call of the store may take"),
    "is_host": (None, "whether the store runs on this host; by default where the endpoint's name leads here"),
    "shrink_timeout": (5, "for which a job that has run waits for more nodes than the fewest"),
    "store_idle_exit": (120, "after its last agent fell silent the store's process leaves"),
    "warm": ("no", "yes forks workers from a process that has imported torch, see Restart speed"),
    "warm_imports": ("", "further modules that this process imports, joined by +"),
    "daemon": ("auto", "auto starts a reft-daemon on this node if none runs; off leaves the agent without one"),
    "etcd_ttl": (3600, "for which etcd keeps a job's keys after its last agent fell silent"),
    "ca_cert": ("", "etcd: the file of the authority that signed its certificates; makes it https"),
    "ssl_cert": ("", "etcd: the file of this client's certificate"),
    "ssl_cert_key": ("", "etcd: the file of its key"),
}
TORCHS_OWN = ("timeout", "rank")  # torchrun adds them by itself; they mean nothing to a dynamic rendezvous


def check(parameters: RendezvousParameters) -> None:
    """Raises ConfigError if --rdzv-conf names what nobody reads."""
    unknown = sorted(set(parameters.config) - set(OPTIONS) - set(TORCHS_OWN))
    if unknown:
        raise ConfigError(
            f"--rdzv-conf names {', '.join(unknown)}, which the reft backend does not know.",
            f"it knows {', '.join(OPTIONS)}",
        )
    for name, (default, _) in OPTIONS.items():
        if isinstance(default, int) and number(parameters, name) <= 0:
            raise ConfigError(f"--rdzv-conf {name}={number(parameters, name)} must be above 0.")
    for name in ("warm", "is_host"):
        truth(parameters, name)


def number(parameters: RendezvousParameters, name: str) -> int:
    """An option that is a whole number.

    Raises:
        ConfigError: it is none.
    """
    text = str(parameters.get(name, OPTIONS[name][0]))
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"--rdzv-conf {name}={text} is no whole number.") from error


def truth(parameters: RendezvousParameters, name: str) -> bool:
    """An option that is yes or no, in any of torch's words for them.

    Raises:
        ConfigError: it is neither.
    """
    try:
        return bool(parameters.get_as_bool(name, OPTIONS[name][0]))
    except ValueError as error:
        said = f"--rdzv-conf {name}={parameters.get(name)} is neither yes nor no."
        raise ConfigError(said, "yes, no, true, false, 1 or 0") from error


def text(parameters: RendezvousParameters, name: str) -> str:
    """An option that is text."""
    return str(parameters.get(name, OPTIONS[name][0])).strip()


def rendezvous_id(run_id: str, slurm_job: str, script: str) -> str:
    """What keeps the agents of one job apart from those of all others on the same store.

    Args:
        run_id: torchrun's --rdzv-id.
        slurm_job: SLURM_JOB_ID.
        script: what is run, alike on all nodes.
    """
    if run_id not in NO_RUN_ID:
        return f"id.{run_id}"
    if slurm_job:
        return f"slurm.{slurm_job}"
    user = pwd.getpwuid(os.getuid()).pw_name
    return f"script.{user}.{hashlib.blake2b(script.encode(), digest_size=8).hexdigest()}"


def script_of(argv: list[str]) -> str:
    """What an agent with this command line runs: torchrun's script, else the program that started it by itself."""
    from torch.distributed.run import get_args_parser

    name = Path(argv[0]).name
    if name not in ("torchrun", "run.py", "agent.py"):
        return argv[0]
    options = get_args_parser().parse_known_args(argv[1:])[0]
    return f"{'-m ' if options.module else ''}{options.training_script}"


def rendezvous_id_of(run_id: str) -> str:
    """`rendezvous_id` of this process."""
    return rendezvous_id(run_id, os.environ.get("SLURM_JOB_ID", ""), script_of(sys.argv))


def job_of(run_id: str, launch: str) -> JobIdentity:
    """The job as its daemons and trainers name it, in this launch."""
    return identify(
        chosen=Config.load().job,
        run_id=run_id,
        slurm_job=os.environ.get("SLURM_JOB_ID", ""),
        script=script_of(sys.argv),
        user=os.getuid(),
        launch=launch,
    )
