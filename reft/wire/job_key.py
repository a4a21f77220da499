"""The job key: one secret of a person, from which the secrets of a job follow.

    REFT_JOB_KEY_FILE ─► JobKey ─► HKDF ─┬─► launch secret: agents and daemons of one launch
    (or REFT_JOB_KEY)                    ├─► job's token: daemons and trainers of the job
                                         └─► entry key: MACs of what agents write into the store

Every node that has the key computes the same secrets, so none of them lies in the rendezvous store.
torchrun's agent takes the key out of its environment before it starts any process.

`Config` has no field for the key: people see settings, and must never see the key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from reft.config import SECRET_VARIABLES
from reft.errors import ConfigError

FILE_VARIABLE, VARIABLE, PASSWORD_VARIABLE = SECRET_VARIABLES
KEY_MIN: Final = 16  # bytes
KEY_MAX: Final = 4096
SECRET_BYTES: Final = 32
MARK_BYTES: Final = 4
_BLOCK: Final = hashlib.sha256().digest_size
REMEDY: Final = "head -c 32 /dev/urandom | base64 > FILE, chmod 600 FILE, and the same file on every node"


def hkdf_sha256(key: bytes, salt: bytes, info: bytes, nbytes: int) -> bytes:
    """Returns bytes that are derived from a key, by HKDF with SHA-256 (RFC 5869).

    Args:
        key: the input keying material.
        salt: need not be secret; empty: zeros.
        info: says what the bytes are for.
        nbytes: how many bytes; at most 255 blocks of 32.
    """
    if not 0 < nbytes <= 255 * _BLOCK:
        raise ValueError(f"{nbytes} bytes were asked of HKDF; it gives 1 to {255 * _BLOCK}")
    extracted = hmac.digest(salt or bytes(_BLOCK), key, "sha256")
    block, derived = b"", b""
    for number in range(1, -(-nbytes // _BLOCK) + 1):
        block = hmac.digest(extracted, block + info + bytes([number]), "sha256")
        derived += block
    return derived[:nbytes]


@dataclass(frozen=True)
class JobKey:
    """The secret that all nodes of a job have.

    Attributes:
        secret: the bytes of the key; never shown.
    """

    secret: bytes = field(repr=False)

    @property
    def mark(self) -> str:
        """A few bytes by which ranks see whether they have the same key."""
        return hkdf_sha256(self.secret, b"", b"reft mark", MARK_BYTES).hex()

    def launch_secret(self, job: str, launch: str) -> bytes:
        """Returns the token of the agents and daemons of one launch.

        Args:
            job: name of the job, as its agents know it.
            launch: id of the launch.
        """
        return hkdf_sha256(self.secret, launch.encode(), b"reft launch\0" + job.encode(), SECRET_BYTES)

    def job_token(self, job: str) -> bytes:
        """Returns the token of a job.

        Args:
            job: name of the job, as the one who derives the token knows it.
        """
        return hkdf_sha256(self.secret, b"", b"reft job\0" + job.encode(), SECRET_BYTES)

    def entry_key(self, rendezvous_id: str) -> bytes:
        """Returns the key of the MACs on a job's entries in the rendezvous store.

        Args:
            rendezvous_id: under which the job's agents meet.
        """
        return hkdf_sha256(self.secret, b"", b"reft store entry\0" + rendezvous_id.encode(), SECRET_BYTES)


def load(environment: Mapping[str, str]) -> JobKey | None:
    """Returns the job key that the environment names; None if it names none.

    The file counts if both variables are set.

    Raises:
        ConfigError: the key can't be used; the message does not have it.
    """
    if path := environment.get(FILE_VARIABLE):
        return JobKey(_checked(_read(Path(path)), f"{FILE_VARIABLE}={path}"))
    if text := environment.get(VARIABLE):
        return JobKey(_checked(text.encode(errors="surrogateescape"), VARIABLE))
    return None


@dataclass(frozen=True)
class AgentSecrets:
    """The secrets that an agent has taken out of its environment.

    Attributes:
        key: the job key; None: there was none.
        variables: the variables that had the secrets, for the end of the launch.
    """

    key: JobKey | None = None
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def etcd_password(self) -> str:
        """The password of --rdzv-conf=etcd_user; empty: none."""
        return self.variables.get(PASSWORD_VARIABLE, "")


def take(environment: MutableMapping[str, str]) -> AgentSecrets:
    """Returns an agent's secrets, and removes their variables from the environment.

    Raises:
        ConfigError: see `load`.
    """
    key = load(environment)
    names = [name for name in SECRET_VARIABLES if name in environment]
    return AgentSecrets(key, {name: environment.pop(name) for name in names})


def _read(path: Path) -> bytes:
    """Returns what the file holds, without the line's end.

    The file may be a link: who owns the file, and may read it, is asked of what was opened.

    Raises:
        ConfigError: the file can't be read, or others may have written or read it.
    """
    what = f"the job key {FILE_VARIABLE}={path}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block
    except OSError as error:
        raise ConfigError(f"{what} can't be read: {error.strerror}.", REMEDY) from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise ConfigError(f"{what} is no file.", REMEDY)
        if facts.st_uid != os.getuid():
            raise ConfigError(f"{what} belongs to user {facts.st_uid}; it must be yours, {os.getuid()}.", REMEDY)
        if facts.st_mode & 0o077:
            mode = stat.S_IMODE(facts.st_mode)
            raise ConfigError(f"{what} has mode {mode:o}, so others may use it.", f"chmod 600 {path}")
        return os.read(descriptor, KEY_MAX + 1).rstrip(b"\r\n")
    finally:
        os.close(descriptor)


def _checked(secret: bytes, name: str) -> bytes:
    if not KEY_MIN <= len(secret) <= KEY_MAX:
        at_least = f"{KEY_MIN} to {KEY_MAX} are allowed"
        raise ConfigError(f"the job key {name} has {min(len(secret), KEY_MAX + 1)} bytes; {at_least}.", REMEDY)
    return secret
