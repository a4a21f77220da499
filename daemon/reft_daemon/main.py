"""`reft-daemon`: reads the flags, opens the sockets, and runs until a signal stops it."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Coroutine
from pathlib import Path

import click

from reft.config import Config, parse_size, slots_folder
from reft.core.budget import format_bytes
from reft.errors import AttachError, ConfigError, ReftError
from reft.failpoints import Failpoints
from reft.log_lines import QueuedLogHandler, begin_log
from reft.wire import rpc
from reft.wire.process import oom_score, set_oom_score
from reft.wire.tls import Tls
from reft_daemon import __version__
from reft_daemon.arena.arena import Arena
from reft_daemon.arena.pool import SparePool
from reft_daemon.arena.shortage import take_all_descriptors
from reft_daemon.arena.threads import begin_in_thread
from reft_daemon.jobs.scrub import scrub_for_ever
from reft_daemon.membership.retention import RetentionTimes
from reft_daemon.peers.channels import PeerChannels
from reft_daemon.rebuild.repair import repair_for_ever
from reft_daemon.registry import Registry
from reft_daemon.server.service import DaemonIdentity, DaemonService, HealthService, PeerService
from reft_daemon.server.settings import (
    DaemonSettings,
    certificates,
    check_domain,
    check_listen,
    check_node,
    check_seconds,
    mover_settings,
    parse_spare,
    persist_settings,
)
from reft_daemon.server.socket_keeper import SocketKeeper

log = logging.getLogger("reft.daemon")
OOM_SCORE = -900  # all trainers of the node need this process
SPARE_S = 5.0  # between two tries to make spare files
GRACE_S = 1.0  # time that running calls get to end when the daemon stops


async def serve(settings: DaemonSettings, log_file: QueuedLogHandler | None) -> None:
    """Runs the daemon until SIGTERM, SIGINT, or the end of the idle time."""
    take_all_descriptors()
    if oom_score() > OOM_SCORE and not set_oom_score(OOM_SCORE):
        log.info("oom_score_adj stays %d: only CAP_SYS_RESOURCE may lower it to %d", oom_score(), OOM_SCORE)
    socket_keeper = SocketKeeper(settings.socket)
    failpoints = Failpoints(Config.load().failpoints)
    arena = Arena(settings.folder, settings.memory_bytes, settings.spare, failpoints)
    addresses = _listen(settings, arena, socket_keeper)
    own_addresses = {*addresses, _socket_address(settings)}
    peers, beats = (
        PeerChannels(settings.tls, own_addresses),
        PeerChannels(settings.tls, own_addresses, own_connections=True),
    )
    mover = mover_settings(settings)
    registry = Registry(arena, peers, settings.ttl_s, failpoints, beats, settings.kills_hung, mover, settings.persist)
    identity = DaemonIdentity(
        settings.node, settings.domain, addresses, str(socket_keeper.local_path), settings.memory_bytes,
        settings.tls is not None, settings.idle_exit_s > 0,
    )  # fmt: skip
    # The servers of both doors share these service objects, so only one rebuild runs at a time.
    services = {
        "reft.v1.Daemon": DaemonService(registry, identity, socket_keeper.thread.refusals.status),
        "reft.v1.Peer": PeerService(registry),
        "grpc.health.v1.Health": HealthService(),
    }
    registry.adopt()
    telling = asyncio.ensure_future(registry.tell_changes())
    await socket_keeper.open(registry, services, settings.tls)
    bound = f"at most {format_bytes(settings.memory_bytes)}" if settings.memory_bytes else "the machine's free memory"
    log.info(
        "reft-daemon %s node=%s socket=%s slots=%s memory=%s",
        __version__,
        settings.node,
        settings.socket,
        settings.folder,
        bound,
    )
    for address in addresses:
        log.info("address=%s", address)
    scrubbing = asyncio.ensure_future(scrub_for_ever(registry.jobs, registry.scrubbed))
    repairing = asyncio.ensure_future(repair_for_ever(registry))
    await _until_stopped(registry, socket_keeper.watch(), settings, log_file)
    for task in (scrubbing, repairing):
        task.cancel()
    await asyncio.wait({scrubbing, repairing})  # a repair frees its draft
    await socket_keeper.close(GRACE_S)
    await registry.close(settings.purge)
    await telling
    arena.close()
    socket_keeper.release()


def _socket_address(settings: DaemonSettings) -> str:
    return rpc.check_address(f"unix:{settings.socket}")


def _listen(settings: DaemonSettings, arena: Arena, socket_keeper: SocketKeeper) -> tuple[str, ...]:
    """Listens for the daemons of other nodes; returns the addresses where they call this one.

    With port 0, the port that this daemon had before a restart is tried first.

    Raises:
        ConfigError: the port can't be opened.
    """
    if not settings.listen:
        return (_socket_address(settings),)
    # A daemon that listens does not offer its socket path too. On another host that path leads to
    # another daemon, which callers would take for this one while this one is away. Daemons of one
    # host that don't listen reach each other by the socket.
    host, _, port_text = rpc.check_address(settings.listen).rpartition(":")
    port = int(port_text)
    for candidate in dict.fromkeys((port or arena.port, port)):
        try:
            arena.port = socket_keeper.listen(settings.host, candidate)
            return (f"{host}:{arena.port}",)
        except OSError as failure:
            error = failure  # the earlier port may belong to another process by now
    raise ConfigError(
        f"can't listen on {settings.listen}: {error.strerror or error}.",
        "give this node's own name or IP address and a free port; port 0 takes any free one",
    ) from error


async def _until_stopped(
    registry: Registry,
    socket_keeper: Coroutine[None, None, None],
    settings: DaemonSettings,
    log_file: QueuedLogHandler | None,
) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    if settings.tls:
        settings.tls.watch()
    loop.add_signal_handler(signal.SIGHUP, _reload, settings.tls, log_file)
    tasks = {
        asyncio.ensure_future(stopped.wait()),
        asyncio.ensure_future(registry.expire_for_ever(settings.idle_exit_s)),
        asyncio.ensure_future(socket_keeper),
        asyncio.ensure_future(registry.heartbeat_service.run()),
        asyncio.ensure_future(registry.persists.run()),
        asyncio.ensure_future(_refill_spare_files(registry.arena.pool)),
    }
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if stopped.is_set():
        await registry.persists.flush()  # the other tasks serve on meanwhile
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the clean end
    for task in pending:
        task.cancel()
    registry.arena.pool.close()
    for task in done:
        task.result()


def _reload(tls: Tls | None, log_file: QueuedLogHandler | None) -> None:
    """Answers SIGHUP: opens the log anew, and reads the certificates again."""
    if log_file is not None:
        log_file.reopen()
    if tls is not None:
        tls.reread()
    if tls is None and log_file is None:
        log.info("SIGHUP: this daemon has neither certificates nor a log file to reload")


async def _refill_spare_files(pool: SparePool) -> None:
    while True:
        if pool.want.count:
            try:
                await begin_in_thread(pool.refill)
            except (OSError, RuntimeError, ReftError) as error:  # perhaps no thread can be started
                log.error("spare files can't be made, slots are made without them: %s", error)
        await asyncio.sleep(SPARE_S)


@click.command(context_settings={"auto_envvar_prefix": "REFT", "show_default": True})
@click.option(
    "--node",
    default=socket.gethostname,
    help="Name of this node, as `reft-cli status` shows it.",
    show_default="host name",
)
@click.option(
    "--domain",
    default="",
    help="Failure domain: nodes with the same label are lost together, e.g. those of a rack.",
    show_default="the node itself",
)
@click.option(
    "--socket",
    "socket_path",
    type=click.Path(path_type=Path),
    help="Unix socket for the trainers of this node and reft-cli.",
    envvar="REFT_SOCKET",
)
@click.option(
    "--listen",
    default="",
    help="HOST:PORT at which the daemons of other nodes call this one; port 0 takes a free port.",
)
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), help="Folder for the slots, on a tmpfs.", envvar="REFT_DIR"
)
@click.option(
    "--memory",
    default="0",
    help="Limit on the memory of all slots, e.g. 64GiB; 0: only the free memory of machine and container limits it.",
)
@click.option(
    "--spare", default="", help="COUNTxSIZE: files to keep ready for slots on a standby node, e.g. 24x2.7GiB."
)
@click.option("--ttl", default=1800.0, help="Seconds to keep a job's slots after its last trainer has ended.")
@click.option(
    "--ttl-failed",
    default=86400.0,
    help="The same, for a job with a name or a living agent, unless it ended well.",
)
@click.option(
    "--idle-exit", default=0.0, help="Exit after this many seconds without a job and without an agent; 0: never."
)
@click.option(
    "--purge", is_flag=True, help="Free all slots when the daemon stops. Without it, the next daemon takes them over."
)
@click.option(
    "--tls-cert",
    type=click.Path(path_type=Path),
    help="File with this node's certificate (mutual TLS between daemons).",
)
@click.option("--tls-key", type=click.Path(path_type=Path), help="File with the key of that certificate.")
@click.option(
    "--tls-ca",
    type=click.Path(path_type=Path),
    help="File with the certificate of the authority that signed the certificates of all nodes.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Allow --listen beyond loopback without TLS: the state travels in plain text.",
)
@click.option(
    "--kill-hung",
    is_flag=True,
    help="Kill a rank of this node that makes no progress while all others wait for it; torchrun restarts the job.",
)
@click.option(
    "--bulk",
    default="",
    help="HOST or HOST:PORT, perhaps of another network card, to exchange parity with other nodes; without it the "
    "host of --listen, at any free port.",
)
@click.option(
    "--protect-bandwidth",
    default="auto",
    help="Bytes per second that this node sends at most for the exchange of parity, e.g. 200M/s; off: no limit; auto: a "
    "tenth of the link, and each turn spread over 30 s, unless it takes less than a second.",
)
@click.option(
    "--persist",
    default="",
    metavar="DIR|URL",
    help="Where checkpoints lie, the same on all nodes: a folder that they share, such as NFS, or s3://BUCKET/PREFIX "
    "(gs://, az://), with credentials from the environment.",
)
@click.option(
    "--persist-key-file",
    type=click.Path(path_type=Path),
    help="File with a secret key, the same on all nodes: checkpoints get a MAC, and none without the right one is read.",
)
@click.option(
    "--persist-every",
    default="0",
    metavar="TIME",
    help="Time between two checkpoints of a job, e.g. 30m; 0: only on request (reft-cli persist).",
)
@click.option("--keep", default=3, help="How many of the newest checkpoints of a job stay on storage.")
@click.option(
    "--keep-each",
    default="0",
    metavar="TIME",
    help="One checkpoint of each such time stays, too, e.g. 24h; 0: none.",
)
@click.option(
    "--flush-on-exit",
    is_flag=True,
    help="Write the newest whole step to storage when the last trainer of a job has ended, and on SIGTERM.",
)
@click.option(
    "--grace",
    default="25s",
    metavar="TIME",
    help="How long --flush-on-exit may delay the end of the daemon after SIGTERM.",
)
@click.option(
    "--log",
    "log_path",
    type=click.Path(path_type=Path),
    help="File for the log in place of stderr, at most 32 MiB with FILE.1; SIGHUP opens it anew.",
    envvar="REFT_LOG",
)
@click.version_option(__version__)
def main(
    node: str, domain: str, socket_path: Path | None, listen: str, folder: Path | None, memory: str, spare: str,
    ttl: float, ttl_failed: float, idle_exit: float, purge: bool, tls_cert: Path | None, tls_key: Path | None,
    tls_ca: Path | None, insecure: bool, kill_hung: bool, bulk: str, protect_bandwidth: str, persist: str,
    persist_key_file: Path | None, persist_every: str, keep: int, keep_each: str, flush_on_exit: bool, grace: str,
    log_path: Path | None,
) -> None:  # fmt: skip
    """Keeps the snapshots of this node's training jobs in memory, even after trainers end.

    Every flag is also an environment variable: --memory is REFT_MEMORY.
    """
    try:
        log_file = begin_log(log_path)
    except OSError as error:
        raise click.UsageError(f"the log {log_path} can't be opened: {error.strerror}") from error
    try:
        socket_path = socket_path or Path(Config.load().runtime_dir) / "daemon.sock"
        tls_files = (tls_cert, tls_key, tls_ca)
        if any(tls_files) and not all(tls_files):
            raise ConfigError(
                "--tls-cert, --tls-key and --tls-ca belong together, and some are missing.", "give all three"
            )
        tls = certificates(tls_cert, tls_key, tls_ca, node, listen) if tls_cert and tls_key and tls_ca else None
        settings = DaemonSettings(
            check_node(node), check_domain(domain), socket_path.absolute(), listen,
            (folder or slots_folder(socket_path)).absolute(),
            parse_size(memory), parse_spare(spare),
            RetentionTimes(check_seconds("--ttl", ttl), check_seconds("--ttl-failed", ttl_failed)),
            check_seconds("--idle-exit", idle_exit), purge, tls, insecure, kill_hung, bulk, protect_bandwidth,
            persist_settings(persist, persist_every, keep, keep_each, flush_on_exit, grace, persist_key_file),
        )  # fmt: skip
        check_listen(settings)
        mover_settings(settings)
        if insecure and listen:
            log.warning(
                "--insecure: the state travels in plain text; anyone on the way to %s can read and change it", listen
            )
        gc.freeze()  # imported modules stay: no collection of garbage need walk over their objects
        asyncio.run(serve(settings, log_file))
    except AttachError as error:
        log.error("%s", error)
        raise SystemExit(1) from error
    except (ReftError, OSError) as error:
        log.error("%s", error)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from error
    finally:
        if log_file is not None:
            log_file.close()
