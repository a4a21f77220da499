"""The daemon's flags, checked."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
from dataclasses import dataclass
from pathlib import Path

from reft.config import DURATION_MAX_S, SIZE_MAX, parse_duration, parse_size
from reft.core.coding.turn_pace import NO_LIMIT, BandwidthLimit, automatic_limit, fixed_limit
from reft.core.persist.retention import RetentionSettings
from reft.errors import ConfigError
from reft.wire import rpc
from reft.wire.tls import Tls
from reft_daemon.arena.pool import SpareFiles
from reft_daemon.membership.retention import RetentionTimes
from reft_daemon.mover.link_speed import interface_of, link_speed
from reft_daemon.mover.mover import MoverSettings
from reft_daemon.persist.persister import PersistSettings
from reft_daemon.persist.storage_root import check_root

log = logging.getLogger("reft.daemon")
DOMAIN_MAX = 64
NODE_MAX = 255
RATE_MIN = 1 << 20  # bytes per second; slower turns would never end
PORT_MAX = 65535


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


def certificates(cert: Path, key: Path, ca: Path, node: str, listen: str) -> Tls | None:
    """Returns this daemon's certificates; None: they are an agent's, and are not needed.

    An agent or a trainer that starts a daemon has no key of a daemon.

    Raises:
        ConfigError: the files can't be used, or the daemon listens and they are not its own.
    """
    tls = Tls(cert, key, ca)
    if tls.role.is_daemon_on(node):
        return tls
    if listen:
        raise ConfigError(
            f"{cert} is of the {tls.role}; --listen needs the certificate of the daemon on node {node}.",
            "correct --node, or give that certificate; examples/deploy/certificates.sh makes it",
        )
    log.info("this daemon does not listen, and uses no certificates: %s is of the %s", cert, tls.role)
    return None


def check_listen(settings: DaemonSettings) -> None:
    """Raises ConfigError if other nodes can't call `--listen`, or would send state in plain text.

    Plain text beyond loopback is allowed only with `--insecure`.
    """
    if not settings.listen:
        return
    host_text, _, port = settings.listen.rpartition(":")
    if ":" not in settings.listen or not port.isdecimal() or (":" in host_text and not host_text.startswith("[")):
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
    if not host or not port.isdecimal() or int(port) > PORT_MAX or (":" in host and not settings.bulk.startswith("[")):
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


def check_node(name: str) -> str:
    """Returns the name unchanged.

    Raises:
        ConfigError: the name is empty, longer than NODE_MAX, or has characters that can't be
            printed.
    """
    if not 0 < len(name) <= NODE_MAX or not name.isprintable():
        raise ConfigError(
            f"--node {name[:NODE_MAX]!r} has {len(name)} characters; 1 to {NODE_MAX} printable characters are allowed.",
            "give the node's own name, or leave --node out: then it is the host's name",
        )
    return name


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
        ConfigError: the number is below 0, above DURATION_MAX_S, or not a number.
    """
    if not 0 <= seconds <= DURATION_MAX_S:
        raise ConfigError(
            f"{flag} {seconds:g} is not allowed: give a number of seconds, 0 to {DURATION_MAX_S:.0f} (ten years)."
        )
    return seconds


def parse_spare(text: str) -> SpareFiles:
    """Parses the value of --spare; an empty text means no spare files.

    Raises:
        ConfigError: the text is not COUNTxSIZE, or all files together are above SIZE_MAX.
    """
    count, _, size_text = text.partition("x")
    if not text:
        return SpareFiles()
    if not count.isdecimal() or not size_text:
        raise ConfigError(
            f"--spare {text!r} is not COUNTxSIZE.",
            "give the number and the size of a node's slots, e.g. --spare 24x2.7GiB",
        )
    spare = SpareFiles(int(count), parse_size(size_text))
    if spare.bytes > SIZE_MAX:
        raise ConfigError(f"--spare {text!r} is more than {SIZE_MAX >> 40}T.", "e.g. --spare 24x2.7GiB")
    return spare
