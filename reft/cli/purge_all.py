"""`reft-cli purge --all`: leaves nothing on this node of what a daemon of this user held.

    no trainer and no agent lives ─► free each job ─► end the daemon, if attach started it
                                                                │
    no daemon holds its folders, no process maps a slot ◄───────┘
          └─► remove the folder of slots, sockets, locks and logs

A job that trains is refused before anything changes. A daemon that a person or a service started
goes on, without jobs. Without a daemon the folders that it left behind are removed. Folders of
other daemons of this user, which have another --socket, are named and left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from reft.cli.ask import NoSuchJob, ask
from reft.cli.status_view import other_nodes
from reft.cli.storage import STORED_S
from reft.cli.survey import SURVEY_DEADLINE_S
from reft.config import Config, slots_folder
from reft.core.budget import format_bytes
from reft.core.text import counted
from reft.errors import AttachError, ConfigError, DaemonUnavailable
from reft.wire import daemon_launcher, local_socket
from reft.wire.v1 import daemon_pb2 as pb

END_S = 60.0  # the daemon's end: running calls, children and its locks
OWN_FILES = ("daemon.log", "daemon.log.1", "start.lock", "store-*.log")  # beside the socket, in the runtime folder


@dataclass(frozen=True)
class PurgeResult:
    """What `purge --all` has done.

    Attributes:
        node: name of the daemon's node; empty: no daemon has answered.
        freed: job → bytes.
        daemon: pid of the daemon, as it sees itself; 0: none has answered.
        has_ended: whether the daemon was ended.
        removed: folders and files.
        left: path → why it stays.
        others: other nodes that may hold one of the jobs.
    """

    node: str
    freed: dict[str, int]
    daemon: int
    has_ended: bool
    removed: tuple[str, ...]
    left: dict[str, str]
    others: tuple[str, ...]

    def document(self) -> dict[str, object]:
        """Returns the document of --json, without schema_version."""
        return {
            "node": self.node or None,
            "jobs": [{"job": job, "freed_bytes": nbytes} for job, nbytes in self.freed.items()],
            "daemon_pid": self.daemon or None,
            "daemon_ended": self.has_ended,
            "removed": list(self.removed),
            "left": [{"path": path, "reason": reason} for path, reason in self.left.items()],
            "other_nodes": list(self.others),
        }

    def lines(self) -> list[str]:
        """Returns the lines for a person."""
        lines = [f"job {job}: freed {format_bytes(nbytes)}." for job, nbytes in self.freed.items()]
        lines += [f"The daemon, pid {self.daemon}, has ended."] if self.has_ended else []
        lines += [f"Removed {path}" for path in self.removed]
        lines += [f"Left    {path}: {reason}" for path, reason in self.left.items()]
        if not self.left:
            lines.append("Nothing of reft is left on this node." if lines else "Nothing of reft is on this node.")
        if self.others:
            lines.append(f"Other nodes may hold these jobs: run this command on {', '.join(self.others)} too.")
        return lines


class PurgeAllCommand:
    """One run of `reft-cli purge --all`.

    Args:
        address: of this node's daemon, or where it would listen.
        runtime_dir: where attach keeps socket, locks and logs.

    Raises:
        ConfigError: the address is no unix socket.
    """

    def __init__(self, address: str, runtime_dir: Path) -> None:
        if not address.startswith("unix:"):
            raise ConfigError(f"--all can't reach the files of the daemon at {address}.", "--daemon unix:PATH")
        self.address, self._runtime_dir = address, runtime_dir
        self._socket = Path(address.removeprefix("unix:"))

    def look(self) -> pb.StatusReply | None:
        """Returns the daemon's status if nothing is against the purge; None: no daemon runs.

        Raises:
            AttachError: a job trains on this node, or may be about to.
            DaemonUnavailable: a daemon runs, but does not answer.
        """
        reply = self._status()
        if reply is None:
            self._check_mapped(self._slots)
            return None
        for job in reply.jobs:
            nodes = sorted({rank.node for rank in job.ranks if rank.alive})
            if nodes:
                raise AttachError(f"job {job.job} trains on {', '.join(nodes)}.", "end the job first, its launcher too")
        if reply.agents:
            pids = ", ".join(map(str, reply.agents))
            raise AttachError(f"torchrun (pid {pids}) runs here, and may start its job again.", "end torchrun first")
        return reply

    def run(self) -> PurgeResult:
        """Frees the jobs, ends the daemon if attach started it, and removes its files.

        Raises:
            AttachError: see `look`; or the daemon does not end, or another one is being started.
            ReftError: the daemon refused.
        """
        with self._no_start():
            reply = self.look()
            if reply is None:
                return PurgeResult("", {}, 0, False, *self._remove(self._slots), ())
            # A daemon without a common protocol is refused here, before anything is freed.
            has_ended = daemon_launcher.hello(self.address).unattended
            names = [job.job for job in reply.jobs] + [damaged.job for damaged in reply.damaged]
            freed = {name: nbytes for name in names if (nbytes := self._free(name)) is not None}
            if has_ended:
                self._end()
                removed, left = self._remove(Path(reply.directory))
                if not Path(reply.directory).exists():  # the daemon has removed this folder itself
                    removed = tuple(dict.fromkeys((reply.directory, *removed)))
            else:
                removed, left = (), self._others()
                left[str(self._socket)] = (
                    f"attach did not start this daemon, so it goes on; to end it: kill {reply.pid}"
                )
        others = {rank.node for job in reply.jobs for rank in job.ranks}
        others |= {node for job in reply.jobs for node in job.silent_nodes}
        return PurgeResult(reply.node, freed, reply.pid, has_ended, removed, left, tuple(other_nodes(reply, others)))

    def _status(self) -> pb.StatusReply | None:
        try:
            reply: pb.StatusReply = ask(self.address, "Status", pb.StatusRequest(deep=True), SURVEY_DEADLINE_S)
            return reply
        except DaemonUnavailable:
            with _free_lock(self._lock) as is_free:
                if not is_free:
                    raise
            return None

    @property
    def _lock(self) -> Path:
        return self._socket.with_name(f"{self._socket.name}.lock")

    @property
    def _slots(self) -> Path:
        return slots_folder(self._socket)

    def _free(self, job: str) -> int | None:
        """Frees a job; returns the bytes, or None if the job is gone."""
        try:
            nbytes: int = ask(self.address, "Purge", pb.PurgeRequest(job=job), STORED_S).freed_bytes
            return nbytes
        except NoSuchJob:
            return None

    def _end(self) -> None:
        """Ends the daemon, and waits until its process is gone.

        Its pid comes from the kernel: the daemon may see itself under another one.

        Raises:
            AttachError: the daemon does not end, or can't be seen from here.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(self._socket))
            pid, _ = local_socket.peer(connection)
            if not pid:
                raise AttachError(
                    "the daemon's process can't be seen from this container.", "run reft-cli where the daemon runs"
                )
            process = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(process, signal.SIGTERM)
            ended = select.poll()  # select() takes no descriptor above 1023
            ended.register(process, select.POLLIN)
            if not ended.poll(END_S * 1000):
                raise AttachError(f"the daemon, pid {pid}, does not end within {END_S:.0f} s.", f"kill -9 {pid}")
        finally:
            os.close(process)

    def _remove(self, slots: Path) -> tuple[tuple[str, ...], dict[str, str]]:
        """Removes the files of an ended daemon; returns the removed paths, and what stays.

        Raises:
            AttachError: a process still has a slot.
        """
        with _free_lock(slots / "lock") as has_slots, _free_lock(self._lock) as has_socket:
            if not (has_slots and has_socket):
                raise AttachError(f"another daemon uses {slots} or {self._socket} by now.", "run this command again")
            self._check_mapped(slots)
            folders, left = [], self._others()
            if slots == self._slots and slots.exists():
                folders += _removed([slots], shutil.rmtree, left)
            elif slots.exists():  # --dir named it; an arena that is empty removes its folder
                left[str(slots)] = f"files there are not reft's; if you need none of them: rm -r {slots}"
            folder, name = self._socket.parent, self._socket.name
            is_own = folder == self._runtime_dir
            patterns = (name, f"{name}.ln", self._lock.name, *(OWN_FILES if is_own else ()))
            found = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
            files = _removed(found, lambda path: path.unlink(missing_ok=True), left)
        if is_own and folder.exists():
            if rest := sorted(path.name for path in folder.iterdir() if str(path) not in left):
                left[str(folder)] = f"{rest[0]} there is not reft's"
            elif len(files) == len(found):
                files = _removed([folder], Path.rmdir, left) or files
        return tuple(map(str, [*folders, *files])), left

    def _others(self) -> dict[str, str]:
        """Returns the folders of slots of other daemons of this user."""
        left = {}
        for path in sorted(self._slots.parent.glob(f"reft-{os.getuid()}-*")):
            if path != self._slots and _is_own_folder(path):
                with _free_lock(path / "lock") as is_free:
                    left[str(path)] = (
                        f"no daemon uses these slots of another --socket; to free them: rm -r {path}"
                        if is_free
                        else "another daemon of yours uses this folder; name its socket in --daemon"
                    )
        return left

    def _check_mapped(self, slots: Path) -> None:
        """Raises AttachError if a process has a slot mapped: a trainer whose daemon was killed."""
        if pids := processes_with(slots):
            raise AttachError(
                f"{counted(len(pids), 'process', 'processes')} (pid {', '.join(map(str, pids))}) still "
                f"{'uses' if len(pids) == 1 else 'use'} slots in {slots}.",
                "end the job first, its launcher too",
            )

    @contextlib.contextmanager
    def _no_start(self) -> Iterator[None]:
        """Keeps attach from starting a daemon meanwhile.

        Raises:
            AttachError: a daemon is being started.
        """
        path = self._runtime_dir / "start.lock"
        with _free_lock(path) as is_free:
            if not is_free:
                raise AttachError("attach starts a daemon on this node now.", "end that job, then try again")
            yield


def _is_own_folder(path: Path) -> bool:
    """Whether a path is a folder of this user. In /dev/shm anybody may take any name."""
    try:
        facts = path.lstat()
    except OSError:  # gone by now
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()


def _removed(paths: Sequence[Path], remove: Callable[[Path], None], left: dict[str, str]) -> list[Path]:
    """Removes folders or files; returns those that are gone. `left` gets why others stay."""
    gone = []
    for path in paths:
        try:
            remove(path)
            gone.append(path)
        except OSError as error:  # such as a read-only file system
            left[str(path)] = f"it can't be removed: {error.strerror}; once it can, run this command again"
    return gone


@contextlib.contextmanager
def _free_lock(path: Path) -> Iterator[bool]:
    """Holds the lock on a file; gives False if another process holds the lock.

    A file that is missing has no lock, so it counts as free.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = True
        except BlockingIOError:
            is_free = False
        yield is_free
    finally:
        os.close(descriptor)


def processes_with(folder: Path) -> list[int]:
    """Returns the pids of this user's processes that have mapped a file in the folder."""
    pids = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # another user's, or gone by now
            if entry.name.isdigit() and f" {folder}/" in (entry / "maps").read_text(errors="replace"):
                pids.append(int(entry.name))
    return sorted(pids)


def purge_all_command(address: str) -> PurgeAllCommand:
    """Returns the command for this user's runtime folder."""
    return PurgeAllCommand(address, Path(Config.load().runtime_dir))
