"""Channels, deadlines, credentials, and the one table that turns errors into statuses and back."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from typing import Final

import grpc

from reft.errors import (
    AlreadyAttached,
    AttachError,
    ConfigError,
    DaemonUnavailable,
    FormatError,
    NoRoom,
    ReftError,
    StaleEpoch,
)
from reft.wire.tls import Tls

MESSAGE_MAX: Final = 34 << 20  # bytes: two manifests of 16 MiB, as a decision and an inventory have, and their envelope
TOKEN_KEY: Final = "reft-token-bin"
UNIX_PATH_MAX: Final = 107  # bytes, of the kernel's sockaddr_un

OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_MAX),
    ("grpc.max_send_message_length", MESSAGE_MAX),
    ("grpc.so_reuseport", 0),  # else two daemons share one port without an error
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),  # gRPC's own two minutes outlast a recovery
    ("grpc.enable_http_proxy", 0),
    ("grpc.http2.max_ping_strikes", 0),  # of our own pings a server makes nothing
)
# What gRPC calls the least backoff is how long a connection may take to be made. Where all cores are busy that can be
# seconds, and the caller has said with a deadline how long it waits.
_CONNECT: Final = "grpc.min_reconnect_backoff_ms"
_NEAR: Final = ((_CONNECT, 20_000),)  # a unix socket: where nobody listens it fails at once
# Another host. To one that was cut off the kernel sends again what was under way at ever longer intervals, up to two minutes:
# until then a node that is back would stay silent. So a connection ends if what was sent is not acknowledged within the time
# that a ping has (TCP_USER_TIMEOUT), and is made anew.
_FAR: Final = ((_CONNECT, 3_000), ("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 10_000))

# One class per status, in both directions; a test fails when a class that the daemon raises is missing.
STATUS_OF: Final[dict[type[ReftError], grpc.StatusCode]] = {
    ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    AlreadyAttached: grpc.StatusCode.ALREADY_EXISTS,
    NoRoom: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StaleEpoch: grpc.StatusCode.ABORTED,
    FormatError: grpc.StatusCode.DATA_LOSS,
    AttachError: grpc.StatusCode.FAILED_PRECONDITION,
    DaemonUnavailable: grpc.StatusCode.UNAVAILABLE,
}
_ERROR_OF: Final = {status: kind for kind, status in STATUS_OF.items()}
CODES: Final[dict[int, grpc.StatusCode]] = {code.value[0]: code for code in grpc.StatusCode}


def status_of(error: ReftError) -> grpc.StatusCode:
    """The status that an error travels as."""
    for kind in type(error).__mro__:
        if kind in STATUS_OF:
            return STATUS_OF[kind]
    return grpc.StatusCode.INTERNAL


def error_of(error: grpc.RpcError, address: str) -> ReftError:
    """The error that a failed call stands for."""
    return error_from(error.code(), error.details() or "", address)


def error_from(code: grpc.StatusCode, details: str, address: str) -> ReftError:
    """The error that a status and its text stand for."""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DaemonUnavailable(f"the daemon at {address} did not answer in time.", "look at its log; is it stopped?")
    if code is grpc.StatusCode.UNAVAILABLE:
        is_another_users = "Permission denied" in details and address.startswith("unix:")
        remedy = "daemon, trainers and reft-cli are one user" if is_another_users else "start reft-daemon there"
        # "failed to connect to all addresses; last error: CODE: ADDRESS: why"
        reason = details.partition("; last error: ")[2].split(": ", 2)[-1] or details
        return DaemonUnavailable(f"no daemon answers at {address}: {reason}.", remedy)
    return _ERROR_OF.get(code, AttachError)(details or f"the daemon at {address} failed: {code}.")


def check_address(address: str) -> str:
    """The address itself.

    Raises:
        ConfigError: neither unix:PATH (at most 107 bytes) nor host:port.
    """
    if address.startswith("unix:"):
        length = len(address.removeprefix("unix:").encode())
        if not 0 < length <= UNIX_PATH_MAX:
            raise ConfigError(
                f"the socket's path has {length} bytes; the kernel allows {UNIX_PATH_MAX}.", "a shorter path"
            )
        return address
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{address!r} is no address.", "unix:/path/to/daemon.sock, or host:port")
    return address


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host: a loopback address, or a name that stands for nothing else here.

    Debian has a machine's own name stand for 127.0.1.1. A number of IPv6 comes without brackets.
    """
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)} if host else set()
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(each).partition("%")[0]).is_loopback for each in found)


def channel(address: str, tls: Tls | None = None) -> grpc.Channel:
    """A blocking channel: to a unix socket, as trainers and the CLI use it, or to a daemon of another node."""
    options = _options(address)
    if tls is None or address.startswith("unix:"):
        return grpc.insecure_channel(check_address(address), options=options)
    return grpc.secure_channel(check_address(address), tls.client(), options=options)


def peer_channel(address: str, tls: Tls | None, apart: bool = False) -> grpc.aio.Channel:
    """An asyncio channel to another daemon; `apart`: with a connection of its own, where gRPC would share one."""
    options = (*_options(address), ("grpc.use_local_subchannel_pool", int(apart)))
    if tls is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(check_address(address), options=options)
    return grpc.aio.secure_channel(check_address(address), tls.client(), options=options)


def _options(address: str) -> tuple[tuple[str, int], ...]:
    return (*OPTIONS, *(_NEAR if address.startswith("unix:") else _FAR))


def token_metadata(token: bytes) -> tuple[tuple[str, bytes], ...]:
    """The metadata by which a caller over TCP proves that it belongs to the job."""
    return ((TOKEN_KEY, token),)


def has_token(metadata: object, token: bytes) -> bool:
    """Whether `metadata` carries the job's token; compared in constant time."""
    given = dict(metadata or ()).get(TOKEN_KEY, b"")  # type: ignore[call-overload]
    return bool(token) and isinstance(given, bytes) and hmac.compare_digest(given, token)
