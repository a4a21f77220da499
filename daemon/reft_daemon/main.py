"""`reft-daemon`: reads the flags, opens the sockets, and runs until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path

import click
import grpc
from grpc_health.v1 import health as health_service
from grpc_health.v1 import health_pb2, health_pb2_grpc

from reft.config import Config, parse_duration, parse_size, slots_folder
from reft.core.budget import format_bytes
from reft.core.coding.turn_pace import NO_LIMIT, BandwidthLimit, automatic_limit, fixed_limit
from reft.core.persist.retention import RetentionSettings
from reft.errors import AttachError, ConfigError, ReftError
from reft.failpoints import Failpoints
from reft.wire import rpc
from reft.wire.process import oom_score, set_oom_score
from reft.wire.tls import Tls
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon import __version__
from reft_daemon.arena.arena import Arena
from reft_daemon.arena.pool import SpareFiles, SparePool
from reft_daemon.arena.shortage import take_all_descriptors
from reft_daemon.jobs.scrub import scrub_for_ever
from reft_daemon.mover.link_speed import interface_of, link_speed
from reft_daemon.mover.mover import MoverSettings
from reft_daemon.peers.round_replicator import PeerChannels
from reft_daemon.persist.persister import PersistSettings
from reft_daemon.persist.storage_root import check_root
from reft_daemon.rebuild.repair import repair_for_ever
from reft_daemon.registry import Registry, RetentionTimes
from reft_daemon.server import grpc_server
from reft_daemon.server.service import DaemonIdentity, DaemonService, PeerService
from reft_daemon.server.socket_keeper import SocketKeeper

log = logging.getLogger("reft.daemon")
DOMAIN_MAX = 64
OOM_SCORE = -900  # all trainers of the node need this process
RATE_MIN = 1 << 20  # bytes per second; slower turns would never end
PORT_MAX = 65535
SPARE_S = 5.0  # between two tries to make spare files
GRACE_S = 1.0  # time that running calls get to end when the daemon stops


@dataclass(frozen=True)
class DaemonSettings:
    """The daemon's flags, checked."""

    node: str
    domain: str
    socket: Path
    listen: str
    folder: Path
    memory_bytes: int
    spare: SpareFiles
    ttl_s: RetentionTimes
    idle_exit_s: float
    purge: bool
    tls: Tls | None
    insecure: bool
    kills_hung: bool
    bulk: str = ""
    protect_bandwidth: str = "auto"
    persist: PersistSettings | None = None

    @property
    def host(self) -> str:
        """The host part of `listen`; empty if `listen` names none."""
        return self.listen.rpartition(":")[0].strip("[]")


def check_listen(settings: DaemonSettings) -> None:
    """Raises ConfigError if other nodes can't call `--listen`, or would send state in plain text.

    Plain text beyond loopback is allowed only with `--insecure`.
    """
    if not settings.listen:
        return
    host_text, _, port = settings.listen.rpartition(":")
    if ":" not in settings.listen or not port.isdigit() or (":" in host_text and not host_text.startswith("[")):
        raise ConfigError(
            f"--listen {settings.listen} is not HOST:PORT.",
            "e.g. --listen node7:29700; put an IPv6 address in brackets, e.g. [fd00::7]:29700",
        )
    if not settings.tls and not settings.insecure and not rpc.is_loopback(settings.host):
        raise ConfigError(
            f"--listen {settings.listen} is reachable from other hosts, and there is no TLS.",
            "give --tls-cert, --tls-key and --tls-ca; on a network that you trust, --insecure is enough",
        )
    name = "node7" if rpc.is_loopback(socket.getfqdn()) else socket.getfqdn()
    remedy = f"give this node's own name or IP address, e.g. --listen {name}:{port}"
    if settings.host in ("", "*", "0.0.0.0", "::"):
        raise ConfigError(f"--listen {settings.listen} names no address that other nodes can call.", remedy)
    if settings.host != "localhost" and not _is_number(settings.host) and rpc.is_loopback(settings.host):
        raise ConfigError(
            f"--listen {settings.listen}: {settings.host} is loopback on this machine; other nodes can't call it.",
            "give this node's IP address as a number, or correct the line in /etc/hosts",
        )


def mover_settings(settings: DaemonSettings) -> MoverSettings:
    """Returns how the mover listens.

    Raises:
        ConfigError: `--bulk` is not HOST or HOST:PORT, would send state in plain text, or
            `--protect-bandwidth` is neither a rate, nor auto, nor off.
    """
    if not settings.bulk:
        host = settings.host or "127.0.0.1"
        return MoverSettings(host, 0, bandwidth_limit(settings.protect_bandwidth, host), settings.tls)
    has_port = ":" in settings.bulk.rpartition("]")[2]
    host, _, port = settings.bulk.rpartition(":") if has_port else (settings.bulk, "", "0")
    host = host.strip("[]")
    if not host or not port.isdigit() or int(port) > PORT_MAX or (":" in host and not settings.bulk.startswith("[")):
        raise ConfigError(
            f"--bulk {settings.bulk} is neither HOST nor HOST:PORT.", "e.g. --bulk 10.1.0.7 or --bulk [fd00::7]:29701"
        )
    if host in ("*", "0.0.0.0", "::"):
        raise ConfigError(
            f"--bulk {settings.bulk} names no address that other nodes can call.", "give one of this node's own"
        )
    if not settings.tls and not settings.insecure and not rpc.is_loopback(host):
        raise ConfigError(
            f"--bulk {settings.bulk} is reachable from other hosts, and there is no TLS.",
            "give --tls-cert, --tls-key and --tls-ca; on a network that you trust, --insecure is enough",
        )
    limit = bandwidth_limit(settings.protect_bandwidth, host)
    return MoverSettings(host, int(port), limit, settings.tls, host)


def bandwidth_limit(flag: str, host: str) -> BandwidthLimit:
    """Returns what the mover may send.

    Args:
        flag: `--protect-bandwidth`.
        host: where the mover listens.

    Raises:
        ConfigError: the flag is neither a rate, nor auto, nor off.
    """
    if flag == "off":
        return NO_LIMIT
    if flag == "auto":
        interface = interface_of(host)
        return automatic_limit(interface, link_speed(interface))
    bytes_per_s = parse_size(flag.removesuffix("/s"))
    if bytes_per_s < RATE_MIN:
        raise ConfigError(f"--protect-bandwidth {flag} is below {RATE_MIN} bytes/s.", "give e.g. 200M/s, auto or off")
    return fixed_limit(bytes_per_s)


def _is_number(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def check_domain(label: str) -> str:
    """Returns the label unchanged.

    Raises:
        ConfigError: the label is longer than DOMAIN_MAX, or has characters that can't be printed.
    """
    if len(label) > DOMAIN_MAX or not label.isprintable():
        raise ConfigError(
            f"--domain {label!r} has {len(label)} characters; at most {DOMAIN_MAX} printable characters are allowed.",
            "give a short name, e.g. rack-7",
        )
    return label


def persist_settings(
    root: str, every: str, keep: int, keep_each: str, flushes: bool, grace: str, key_file: Path | None = None
) -> PersistSettings | None:
    """Returns how checkpoints are written, from the values of the flags; None: there are none.

    Raises:
        ConfigError: `--persist` is no folder or address by its form, a duration can't be read, a
            flag needs `--persist`, or the key can't be used. The storage itself is not looked at,
            since it may hang.
    """
    every_s, keep_each_s, grace_s = parse_duration(every), parse_duration(keep_each), parse_duration(grace)
    if not root:
        if every_s or flushes or key_file:
            raise ConfigError(
                "--persist-every, --flush-on-exit and --persist-key-file need --persist.", "add --persist DIR"
            )
        return None
    key_file = key_file and key_file.absolute()
    root = check_root(root, key_file)
    if keep < 1:
        raise ConfigError(f"--keep is {keep}; at least the newest checkpoint is kept.", "--keep 1")
    return PersistSettings(root, every_s, RetentionSettings(keep, keep_each_s), flushes, grace_s, key_file)


def check_seconds(flag: str, seconds: float) -> float:
    """Returns the number unchanged.

    Raises:
        ConfigError: the number is below 0, or not a number.
    """
    if not seconds >= 0:
        raise ConfigError(f"{flag} {seconds:g} is not allowed: give a number of seconds, 0 or more.")
    return seconds


def parse_spare(text: str) -> SpareFiles:
    """Parses the value of --spare; an empty text means no spare files.

    Raises:
        ConfigError: the text is not COUNTxSIZE.
    """
    count, _, size_text = text.partition("x")
    if not text:
        return SpareFiles()
    if not count.isdigit() or not size_text:
        raise ConfigError(
            f"--spare {text!r} is not COUNTxSIZE.",
            "give the number and the size of a node's slots, e.g. --spare 24x2.7GiB",
        )
    return SpareFiles(int(count), parse_size(size_text))


async def serve(settings: DaemonSettings) -> None:
    """Runs the daemon until SIGTERM, SIGINT, or the end of the idle time."""
    take_all_descriptors()
    if oom_score() > OOM_SCORE and not set_oom_score(OOM_SCORE):
        log.info("oom_score_adj stays %d: only CAP_SYS_RESOURCE may lower it to %d", oom_score(), OOM_SCORE)
    socket_keeper = SocketKeeper(settings.socket)
    failpoints = Failpoints(Config.load().failpoints)
    arena = Arena(settings.folder, settings.memory_bytes, settings.spare, failpoints)
    tcp_server = grpc_server.server(must_say_protocol=True)
    addresses = _addresses(tcp_server, settings, arena)
    own_addresses = {*addresses, _socket_address(settings)}
    peers, beats = (
        PeerChannels(settings.tls, own_addresses),
        PeerChannels(settings.tls, own_addresses, own_connections=True),
    )
    mover = mover_settings(settings)
    registry = Registry(arena, peers, settings.ttl_s, failpoints, beats, settings.kills_hung, mover, settings.persist)
    trusts_peers = settings.tls is not None or settings.insecure or rpc.is_loopback(settings.host)
    identity = DaemonIdentity(
        settings.node, settings.domain, addresses, str(socket_keeper.local_path), settings.memory_bytes,
        settings.tls is not None, settings.idle_exit_s > 0, trusts_peers,
    )  # fmt: skip
    daemon, peer, health = DaemonService(registry, identity), PeerService(registry), health_service.aio.HealthServicer()

    # All servers share these service objects, so only one rebuild runs at a time on this daemon.
    def add_services(
        server: grpc.aio.Server,
    ) -> None:
        pb_grpc.add_DaemonServicer_to_server(daemon, server)
        pb_grpc.add_PeerServicer_to_server(peer, server)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)

    add_services(tcp_server)
    registry.adopt()
    telling = asyncio.ensure_future(registry.tell_changes())
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    await socket_keeper.open(registry, add_services)
    await tcp_server.start()
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
    await _until_stopped(registry, socket_keeper.watch(registry, add_services), settings.idle_exit_s, settings.tls)
    for task in (scrubbing, repairing):
        task.cancel()
    await asyncio.wait({scrubbing, repairing})  # a repair frees its draft
    await asyncio.gather(tcp_server.stop(GRACE_S), socket_keeper.close(GRACE_S))
    await registry.close(settings.purge)
    await telling
    arena.close()
    socket_keeper.release()


def _addresses(tcp_server: grpc.aio.Server, settings: DaemonSettings, arena: Arena) -> tuple[str, ...]:
    """Returns the addresses where other daemons call this one. `far` listens for other hosts."""
    # A daemon that listens does not offer its socket path too. On another host that path leads to
    # another daemon, which callers would take for this one while this one is away. Daemons of one
    # host that don't listen reach each other by the socket.
    return (_listen(tcp_server, settings, arena),) if settings.listen else (_socket_address(settings),)


def _socket_address(settings: DaemonSettings) -> str:
    return rpc.check_address(f"unix:{settings.socket}")


def _listen(server: grpc.aio.Server, settings: DaemonSettings, arena: Arena) -> str:
    """Listens for the daemons of other nodes; returns the address.

    With port 0, the port that this daemon had before a restart is tried first.

    Raises:
        ConfigError: the port can't be opened.
    """
    host, _, port_text = rpc.check_address(settings.listen).rpartition(":")
    port = int(port_text)
    for candidate in dict.fromkeys((port or arena.port, port)):
        try:
            if settings.tls:
                arena.port = server.add_secure_port(f"{host}:{candidate}", settings.tls.server())
            else:
                arena.port = server.add_insecure_port(f"{host}:{candidate}")
            return f"{host}:{arena.port}"
        except RuntimeError as failure:
            error = failure  # the earlier port may belong to another process by now
    raise ConfigError(
        f"can't listen on {settings.listen}: {_bind_error(settings.host, port) or error}.",
        "give this node's own name or IP address and a free port; port 0 takes any free one",
    ) from error


def _bind_error(host: str, port: int) -> str:
    """Returns the system's reason against listening there; empty if there is none.

    gRPC's own error names no cause.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return ""


async def _until_stopped(
    registry: Registry, socket_keeper: Coroutine[None, None, None], idle_exit_s: float, tls: Tls | None
) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    if tls:
        tls.watch()
    loop.add_signal_handler(
        signal.SIGHUP, tls.reread if tls else lambda: log.info("SIGHUP: this daemon has no certificates to reload")
    )
    tasks = {
        asyncio.ensure_future(stopped.wait()),
        asyncio.ensure_future(registry.expire_for_ever(idle_exit_s)),
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


async def _refill_spare_files(pool: SparePool) -> None:
    while True:
        if pool.want.count:
            try:
                await asyncio.to_thread(pool.refill)
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
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
    help="The same, for a named job that has failed: a trainer ended without closing its session.",
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
    help="Allow --listen beyond loopback without TLS: state and tokens travel in plain text.",
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
@click.version_option(__version__)
def main(
    node: str, domain: str, socket_path: Path | None, listen: str, folder: Path | None, memory: str, spare: str,
    ttl: float, ttl_failed: float, idle_exit: float, purge: bool, tls_cert: Path | None, tls_key: Path | None,
    tls_ca: Path | None, insecure: bool, kill_hung: bool, bulk: str, protect_bandwidth: str, persist: str,
    persist_key_file: Path | None, persist_every: str, keep: int, keep_each: str, flush_on_exit: bool, grace: str,
) -> None:  # fmt: skip
    """Keeps the snapshots of this node's training jobs in memory, even after trainers end.

    Every flag is also an environment variable: --memory is REFT_MEMORY.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        socket_path = socket_path or Path(Config.load().runtime_dir) / "daemon.sock"
        tls_files = (tls_cert, tls_key, tls_ca)
        if any(tls_files) and not all(tls_files):
            raise ConfigError(
                "--tls-cert, --tls-key and --tls-ca belong together, and some are missing.", "give all three"
            )
        tls = Tls(tls_cert, tls_key, tls_ca) if tls_cert and tls_key and tls_ca else None
        settings = DaemonSettings(
            node, check_domain(domain), socket_path.absolute(), listen, (folder or slots_folder(socket_path)).absolute(),
            parse_size(memory), parse_spare(spare),
            RetentionTimes(check_seconds("--ttl", ttl), check_seconds("--ttl-failed", ttl_failed)),
            check_seconds("--idle-exit", idle_exit), purge, tls, insecure, kill_hung, bulk, protect_bandwidth,
            persist_settings(persist, persist_every, keep, keep_each, flush_on_exit, grace, persist_key_file),
        )  # fmt: skip
        check_listen(settings)
        mover_settings(settings)
        if insecure and listen:
            log.warning(
                "--insecure: state and tokens travel in plain text; anyone who can reach %s can read them", listen
            )
        asyncio.run(serve(settings))
    except AttachError as error:
        log.error("%s", error)
        raise SystemExit(1) from error
    except (ReftError, OSError) as error:
        log.error("%s", error)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from error
