"""The configuration. No other code of reft reads the environment.

Precedence: an argument beats the environment (REFT_*), which beats the default.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from reft.errors import ConfigError
from reft.folders import usable_folder

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)

_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)\s*$", re.IGNORECASE)
_UNITS_S = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
DURATION_MAX_S = 3660 * 86_400.0
SIZE_MAX = 1 << 60  # bytes; sums of some sizes still travel as whole numbers of 64 bits
CHUNK_MAX = 1 << 31  # bytes
JOB_KEY_VARIABLES = ("REFT_JOB_KEY_FILE", "REFT_JOB_KEY")
SECRET_VARIABLES = (*JOB_KEY_VARIABLES, "REFT_ETCD_PASSWORD")


def parse_size(text: str) -> int:
    """Returns the bytes that a text such as "64MiB", "1.5G" or "4096" stands for.

    k, M, G and T are powers of 1024.

    Raises:
        ConfigError: the text is not a size, or is above SIZE_MAX.
    """
    match = _SIZE.match(text)
    if not match:
        raise ConfigError(f"{text!r} is not a size.", "write it as 512MiB, 64GiB or a number of bytes")
    power = " kmgt".index(match[2].lower() or " ")
    try:
        size = int(Fraction(match[1]) * 1024**power)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{text[:40]!r} is not a size: {error}.") from error
    if size > SIZE_MAX:
        raise ConfigError(f"{text[:40]!r} is too large; the limit is {SIZE_MAX >> 40}T.")
    return size


def parse_duration(text: str) -> float:
    """Returns the seconds that a text such as "500ms", "30m" or "0" stands for.

    The units are ms, s, m, h and d.

    Raises:
        ConfigError: the text is not a duration.
    """
    match = _DURATION.match(text)
    if not match or (not match[2] and float(match[1])):
        raise ConfigError(
            f"{text[:40]!r} is not a duration.", "write it as 500ms, 90s, 30m, 24h or 7d; 0 needs no unit"
        )
    seconds = float(match[1]) * _UNITS_S[match[2].lower()]
    if seconds > DURATION_MAX_S:
        raise ConfigError(f"{text[:40]!r} is longer than {DURATION_MAX_S / 86_400:.0f} days.")
    return seconds


def _setting(name: str, default: Any) -> Any:
    """Returns a dataclass field that is read from the environment unless a value is passed."""
    return field(default_factory=lambda: _read(name, default, os.environ), metadata={"default": default})


@dataclass(frozen=True)
class Config:
    """Settings of the client.

    A setting that is not passed is read from the environment (REFT_<FIELD>), else the default
    holds.

    Attributes:
        mode: "auto" protects; "off" makes attach do nothing but say so once.
        job: name of the job; empty derives the name from the launcher, see
            `reft.core.membership.job_identity`.
        daemon: address of the node's daemon, unix:PATH or host:port; empty means this user's own
            daemon.
        runtime_dir: folder of this user's daemon socket, lock and log; empty means `runtime_dir()`.
        protect: how snapshots survive lost nodes: auto, arc (copies), aec (erasure code), aor
            (copies of the moments of torch's ZeRO, else as auto) or none.
        tolerate: how many nodes of a group may be lost at once; -1 chooses by the number of nodes.
        slots: snapshots that a rank can hold; 0 chooses 3, or 4 where nodes exchange parity of
            state that only one rank has. 2 are safe; 3 allow a snapshot of every step.
        chunk_bytes: unit of digests. On the CPU one copy moves 1 MiB of chunks, or one chunk if
            that is larger. This fits into a core's cache, so the digest reads from the cache.
        parity_scratch_bytes: the most device memory that computing parity may use.
        load_transport: moves state between ranks in a restore: gloo, or nccl for state on CUDA
            devices.
        attach_deadline_s: the longest that attach waits for the other ranks or for the daemon.
        rpc_deadline_s: the longest that a call beside training may take.
        seal_deadline_s: how long `Session.seal` waits by default.
        overhead_budget: with every="auto", the share of training time that snapshots may take.
        mtbf_s: with every="auto", the mean time between failures of the whole job, in seconds; 0
            means unknown.
        failpoints: faults to inject in tests, see `reft.failpoints`.
        allow_pickled_extra_state: whether modules may answer `get_extra_state` with a pickle, and
            unpickle it in a restore. A pickle runs code, and it may come from another node.
        overrun_scratch_bytes: device memory that takes the bytes not yet copied when the optimizer
            is about to start; with 0 the optimizer waits until the host has these bytes.
        restore: "auto" restores the newest step, or starts at step 0; "require" makes attach fail
            rather than start at step 0; "newest" restores the newest step even if the last restores
            of that step ended before the next one.
        generators: when a restore puts the default random generators back. "auto": at attach, and
            before the first of `session.steps` or of reft's loader. "attach": at attach only, so a
            later reseed stays. "user": never, because the script seeds by itself.
        lineage: which lineage of the job on storage to go on with, 16 hex digits; empty: the only
            one. Needed once after two jobs of one name were started.
        rehearse: where `reft-cli rehearse` wants this process recorded: the path without
            .RANK.jsonl; empty: nothing is recorded.
    """

    mode: str = _setting("mode", "auto")
    job: str = _setting("job", "")
    daemon: str = _setting("daemon", "")
    runtime_dir: str = _setting("runtime_dir", "")
    protect: str = _setting("protect", "auto")
    tolerate: int = _setting("tolerate", -1)
    slots: int = _setting("slots", 0)
    chunk_bytes: int = _setting("chunk_bytes", 256 << 10)
    parity_scratch_bytes: int = _setting("parity_scratch_bytes", 64 << 20)
    load_transport: str = _setting("load_transport", "gloo")
    attach_deadline_s: float = _setting("attach_deadline_s", 120.0)
    rpc_deadline_s: float = _setting("rpc_deadline_s", 2.0)
    seal_deadline_s: float = _setting("seal_deadline_s", 30.0)
    overhead_budget: float = _setting("overhead_budget", 0.001)
    mtbf_s: float = _setting("mtbf_s", 0.0)
    failpoints: str = _setting("failpoints", "")
    overrun_scratch_bytes: int = _setting("overrun_scratch_bytes", 0)
    restore: str = _setting("restore", "auto")
    allow_pickled_extra_state: bool = _setting("allow_pickled_extra_state", False)
    lineage: str = _setting("lineage", "")
    generators: str = _setting("generators", "auto")
    rehearse: str = _setting("rehearse", "")

    def __post_init__(self) -> None:
        if not self.runtime_dir:
            object.__setattr__(self, "runtime_dir", str(runtime_dir()))
        if not Path(self.runtime_dir).is_absolute():
            raise ConfigError(
                f"runtime_dir is {self.runtime_dir!r}; it must begin with /, since daemon and trainers start in other folders.",
                f"REFT_RUNTIME_DIR={os.path.abspath(os.path.expanduser(self.runtime_dir))}",
            )
        if self.mode not in ("auto", "off"):
            raise ConfigError(f"mode is {self.mode!r}; it can be auto or off.", "REFT_MODE=auto")
        if self.restore not in ("auto", "require", "newest"):
            raise ConfigError(f"restore is {self.restore!r}; it can be auto, require or newest.", "REFT_RESTORE=auto")
        if self.generators not in ("auto", "attach", "user"):
            raise ConfigError(
                f"generators is {self.generators!r}; it can be auto, attach or user.", "REFT_GENERATORS=auto"
            )
        if self.lineage and not re.fullmatch("[0-9a-f]{16}", self.lineage):
            raise ConfigError(
                f"lineage is {self.lineage!r}; it must have 16 hex digits.", "reft-cli list JOB shows them"
            )
        if self.load_transport not in ("gloo", "nccl"):
            raise ConfigError(
                f"load_transport is {self.load_transport!r}; it can be gloo or nccl.", "REFT_LOAD_TRANSPORT=gloo"
            )
        if self.slots and not (isinstance(self.slots, int) and 2 <= self.slots <= 16):
            raise ConfigError(
                f"slots is {self.slots!r}; it can be 2 to 16, or 0 to let reft choose.", "slots=3, or REFT_SLOTS=3"
            )
        for name, remedy in (("attach_deadline_s", "120"), ("rpc_deadline_s", "2"), ("seal_deadline_s", "30")):
            if not 0 < getattr(self, name) < 1e6:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be above 0 and below a million seconds.",
                    f"REFT_{name.upper()}={remedy}",
                )
        if not 0 < self.overhead_budget < 1:
            raise ConfigError(
                f"overhead_budget is {self.overhead_budget}; it is a share of time, above 0 and below 1.",
                "REFT_OVERHEAD_BUDGET=0.001",
            )
        if not 0 <= self.mtbf_s < math.inf:
            raise ConfigError(
                f"mtbf_s is {self.mtbf_s}; it is a number of seconds, or 0 if it is not known.", "REFT_MTBF_S=0"
            )
        if (
            not isinstance(self.chunk_bytes, int)
            or self.chunk_bytes % 4096
            or not 4096 <= self.chunk_bytes <= CHUNK_MAX
        ):
            raise ConfigError(
                f"chunk_bytes is {self.chunk_bytes!r}; it must be a multiple of 4096, and at most {CHUNK_MAX}.",
                "REFT_CHUNK_BYTES=256KiB",
            )
        if self.parity_scratch_bytes < 1 << 20:
            raise ConfigError(
                f"parity_scratch_bytes is {self.parity_scratch_bytes}; it must be at least 1 MiB.",
                "REFT_PARITY_SCRATCH_BYTES=64MiB",
            )

    @classmethod
    def load(cls, environment: Mapping[str, str] | None = None, **arguments: object) -> Config:
        """Returns the configuration from `environment`, overridden by `arguments` unless None.

        Raises:
            ConfigError: a value has the wrong type or lies outside its limits.
        """
        overrides = {name: value for name, value in arguments.items() if value is not None}
        if environment is None:
            return cls(**overrides)  # type: ignore[arg-type]
        settings = {each.name: _read(each.name, each.metadata["default"], environment) for each in fields(cls)}
        return cls(**{**settings, **overrides})  # type: ignore[arg-type]


def _read(name: str, default: Any, environment: Mapping[str, str]) -> Any:
    text = environment.get(f"REFT_{name.upper()}")
    return default if text is None else _convert(name, type(default), text)


def _convert(name: str, kind: type, text: str) -> object:
    try:
        if name.endswith("_bytes"):
            return parse_size(text)
        return {"0": False, "1": True}[text] if kind is bool else kind(text)
    except (ValueError, KeyError) as error:
        kinds = {int: "a whole number", float: "a number", bool: "0 or 1"}
        what = "a size such as 64MiB" if name.endswith("_bytes") else kinds.get(kind, kind.__name__)
        raise ConfigError(f"REFT_{name.upper()} is {text!r}; it must be {what}.") from error


def runtime_dir() -> Path:
    """Returns the folder of this user's daemon; always the same folder on one machine.

    The usual variables can't be used. HOME may be read-only, or shared by several nodes.
    XDG_RUNTIME_DIR is removed when the user logs out. On many clusters each job has another TMPDIR.
    In a changed folder restarted trainers would find no daemon, start another, and start fresh. If
    another user has taken the name, it is one folder beside it, see `usable_folder`.

    Raises:
        ConfigError: another user has taken the name, and no other folder can be made.
    """
    base = "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()
    return usable_folder(Path(base) / f"reft-{os.getuid()}")


def slots_folder(socket: Path) -> Path:
    """Returns the slots' folder of the daemon at a socket, without --dir.

    There is one folder for each socket's path: the next daemon at this socket takes the slots over.
    """
    name = hashlib.blake2b(os.fsencode(socket.absolute()), digest_size=4).hexdigest()
    return usable_folder(Path("/dev/shm") / f"reft-{os.getuid()}-{name}")


@dataclass(frozen=True)
class Launch:
    """Facts about this process from the launcher's environment; no decisions.

    Attributes:
        launch: id made by reft's rendezvous, the same on all agents of a launch; else empty.
        round: round of reft's rendezvous; -1 under any other rendezvous.
        whole_step: the newest step that this node's agent knows to have been whole; -1 if none.
        unnamed_job: name that reft's rendezvous gives to a job without a name.
        backend: --rdzv-backend, if the environment gave it.
        asked_id: --rdzv-id, if the environment gave it.
        restarts: how often the agent restarts the ranks.
        is_keyed: whether the agent has a job key, and has told this node's daemon the job's token.
    """

    rank: int
    world: int
    run_id: str
    slurm_job: str
    launch: str = ""
    round: int = -1
    whole_step: int = -1
    unnamed_job: str = ""
    backend: str = ""
    asked_id: str = ""
    restarts: int = 0
    is_keyed: bool = False

    @property
    def under_agent(self) -> bool:
        """Whether a torchrun agent started this process and will restart it."""
        return bool(self.run_id)

    @classmethod
    def load(cls, environment: Mapping[str, str] | None = None) -> Launch:
        """Reads the variables that torchrun and Slurm set."""
        source = os.environ if environment is None else environment
        return cls(
            rank=int(source.get("RANK", "0")),
            world=int(source.get("WORLD_SIZE", "1")),
            run_id=source.get("TORCHELASTIC_RUN_ID", ""),
            slurm_job=source.get("SLURM_JOB_ID", ""),
            launch=source.get("REFT_LAUNCH", ""),
            round=int(source.get("REFT_ROUND", "-1")),
            whole_step=int(source.get("REFT_WHOLE_STEP", "-1")),
            unnamed_job=source.get("REFT_UNNAMED_JOB", ""),
            backend=source.get("PET_RDZV_BACKEND", ""),
            asked_id=source.get("PET_RDZV_ID", ""),
            restarts=int(source.get("TORCHELASTIC_MAX_RESTARTS", "0")),
            is_keyed=source.get("REFT_KEYED") == "1",
        )


def replace_error_file(suffix: str) -> str:
    """Makes torch write this process's error file under another name.

    Args:
        suffix: what the new name has more.

    Returns:
        the path that torchrun's agent reads; empty without an agent, or after an earlier call.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not path or path.endswith(suffix):
        return ""
    os.environ["TORCHELASTIC_ERROR_FILE"] = path + suffix
    return path


def silence_grpc() -> None:
    """Keeps gRPC's core from writing to stderr. Call it before grpc is imported.

    The core writes a line for each handshake that fails, so a log would grow without limit. A value
    that the user has set stays.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def child_environment(**changes: str) -> dict[str, str]:
    """Returns this process's environment with `changes`, for a child process.

    Secrets stay here: no process that reft starts needs them.
    """
    return {**{name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}, **changes}


def job_key_variables() -> dict[str, str]:
    """Returns the variables that name this process's job key; see `reft.wire.job_key`."""
    return {name: os.environ[name] for name in JOB_KEY_VARIABLES if name in os.environ}


def allows_plain_http() -> bool:
    """Whether an object store may be reached without TLS: AWS_ALLOW_HTTP, as obstore calls it."""
    return os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")


def allows_colour(environment: Mapping[str, str] | None = None) -> bool:
    """Decides whether output may have colours.

    Without colours if NO_COLOR is set (no-color.org), or if TERM is "dumb".
    """
    source = os.environ if environment is None else environment
    return not source.get("NO_COLOR") and source.get("TERM") != "dumb"
