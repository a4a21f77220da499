"""Defines channels, deadlines, credentials, and one table between errors and gRPC statuses."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from reft.errors import (
    AlreadyAttached,
    AttachError,
    ConfigError,
    DaemonUnavailable,
    FormatError,
    NoRoom,
    ReftError,
    StaleEpoch,
    split_remedy,
)
from reft.wire import messages
from reft.wire.certificate_role import REMEDY
from reft.wire.tls import Tls
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc

# Bytes: two manifests of 16 MiB, as in a decision or an inventory, and their envelope.
MESSAGE_MAX: Final = 34 << 20
PROTOCOL_KEY: Final = "reft-protocol"
OLDEST_KEY: Final = "reft-oldest"
PROTOCOL_METADATA: Final = ((PROTOCOL_KEY, str(messages.PROTOCOL)), (OLDEST_KEY, str(messages.OLDEST)))
SILENT: Final = 7  # calls and replies up to this protocol do not say their number
UNIX_PATH_MAX: Final = 107  # bytes, of the kernel's sockaddr_un

OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_MAX),
    ("grpc.max_send_message_length", MESSAGE_MAX),
    ("grpc.so_reuseport", 0),  # otherwise two daemons could share one port without an error
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),  # gRPC's own two minutes outlast a recovery
    ("grpc.enable_http_proxy", 0),
)
# gRPC's least backoff is also the time that a connection may take to be made. On busy cores that
# can be seconds. Callers limit their waiting by a deadline anyway.
_CONNECT_TIME: Final = "grpc.min_reconnect_backoff_ms"
_LOCAL_OPTIONS: Final = ((_CONNECT_TIME, 20_000),)  # a unix socket: a connection fails at once where no daemon listens
# Another host. After a cut the kernel resends bytes at ever longer intervals, up to two minutes. A
# host that is back would stay silent until then. So a connection ends if bytes are not acknowledged
# within the time of a ping (TCP_USER_TIMEOUT), and a new one is made.
_REMOTE_OPTIONS: Final = (
    (_CONNECT_TIME, 3_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)

# One class per status, in both directions; a test fails when a class that the daemon raises is
# missing.
STATUS_OF: Final[dict[type[ReftError], grpc.StatusCode]] = {
    ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    AlreadyAttached: grpc.StatusCode.ALREADY_EXISTS,
    NoRoom: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StaleEpoch: grpc.StatusCode.ABORTED,
    FormatError: grpc.StatusCode.DATA_LOSS,
    AttachError: grpc.StatusCode.FAILED_PRECONDITION,
    DaemonUnavailable: grpc.StatusCode.UNAVAILABLE,
}
# gRPC's words for a certificate of another user, of an agent, or of another authority.
_CERTIFICATE_REFUSED: Final = ("Verification Check failed", "CERTIFICATE_VERIFY_FAILED")
_Options = tuple[tuple[str, int | str], ...]
_ERROR_OF: Final = {status: kind for kind, status in STATUS_OF.items()}
CODES: Final[dict[int, grpc.StatusCode]] = {code.value[0]: code for code in grpc.StatusCode}


def status_of(error: ReftError) -> grpc.StatusCode:
    """Returns the status that an error travels as."""
    for kind in type(error).__mro__:
        if kind in STATUS_OF:
            return STATUS_OF[kind]
    return grpc.StatusCode.INTERNAL


def error_of(error: grpc.RpcError, address: str) -> ReftError:
    """Returns the error that a failed call stands for."""
    return error_from(error.code(), error.details() or "", address)


def error_from(code: grpc.StatusCode, details: str, address: str) -> ReftError:
    """Returns the error that a status and its text stand for."""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DaemonUnavailable(f"the daemon at {address} did not answer in time.", "look at its log; is it stopped?")
    if code is grpc.StatusCode.UNAVAILABLE:
        is_another_users = "Permission denied" in details and address.startswith("unix:")
        remedy = "daemon, trainers and reft-cli must run as one user" if is_another_users else _start(address)
        # "failed to connect to all addresses; last error: CODE: ADDRESS: why"
        reason = details.partition("; last error: ")[2].split(": ", 2)[-1] or details
        reason = reason.rstrip(".").removeprefix("connect failed: ").removeprefix(f"addr: {address} error: ")
        if is_certificate_refused(details):
            return DaemonUnavailable(f"the certificate at {address} is not of a daemon of this user: {reason}.", REMEDY)
        return DaemonUnavailable(f"no daemon answers at {address}: {reason}.", remedy)
    return _ERROR_OF.get(code, AttachError)(*split_remedy(details or f"the daemon at {address} failed: {code}."))


def is_certificate_refused(details: str) -> bool:
    """Returns whether a call failed because of the certificate at the called address."""
    return any(words in details for words in _CERTIFICATE_REFUSED)


def _start(address: str) -> str:
    if address.startswith("unix:"):
        return f"start reft-daemon --socket {address.removeprefix('unix:')} on this node, or name another daemon in REFT_DAEMON"
    return f"start reft-daemon on {address.rpartition(':')[0]}, or correct the address"


def check_address(address: str) -> str:
    """Returns the address, if it is valid.

    Raises:
        ConfigError: neither unix:PATH (at most 107 bytes) nor host:port, or not UTF-8.
    """
    if any("\ud800" <= each <= "\udfff" for each in address):
        raise ConfigError(f"the address {address!r} has bytes that are no UTF-8.", "another path")
    if address.startswith("unix:"):
        length = len(address.removeprefix("unix:").encode())
        if not 0 < length <= UNIX_PATH_MAX:
            raise ConfigError(
                f"the socket's path has {length} bytes; the kernel allows {UNIX_PATH_MAX}.", "a shorter path"
            )
        return address
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{address!r} is no address.", "unix:/path/to/daemon.sock, or host:port")
    return address


def check_local_address(address: str) -> str:
    """Returns the address, if it is a unix socket.

    Raises:
        ConfigError: the address is no unix socket, or has too long a path.
    """
    if not address.startswith("unix:"):
        raise ConfigError(
            f"{address!r} is no unix socket. Over TCP a daemon answers only other daemons and agents.",
            "name the daemon of this node: unix:/path/to/daemon.sock",
        )
    return check_address(address)


def check_private(address: str) -> Path:
    """Returns the path of a unix: address, if no other user can put a socket there.

    There need not be a socket: a daemon that restarts makes it again.

    Raises:
        OSError: the folder is not this user's own with mode 0700, or there is something else.
    """
    path = Path(address.removeprefix("unix:"))
    folder = path.parent.lstat()
    is_private = stat.S_ISDIR(folder.st_mode) and folder.st_uid == os.geteuid() and not folder.st_mode & 0o077
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        is_private = is_private and stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()
    if not is_private:
        raise ConnectionError(f"{path} is no socket in a folder that only this user can enter (mode 0700)")
    return path


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches a host: all its addresses are loopback ones.

    On Debian a machine's own name resolves to 127.0.1.1. An IPv6 number comes without brackets.
    """
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)} if host else set()
    except OSError:
        return False
    return bool(addresses) and all(ipaddress.ip_address(str(each).partition("%")[0]).is_loopback for each in addresses)


def channel(address: str, tls: Tls | None = None) -> grpc.Channel:
    """Returns a blocking channel to a unix socket or to a daemon of another node.

    Trainers and the CLI use unix sockets. The channel has its own connection: one that it shared
    could have failed before the daemon was started, and would fail all calls for up to a second.
    """
    options = _options(address, apart=True)
    if tls is None or address.startswith("unix:"):
        return grpc.insecure_channel(check_address(address), options=options)
    return grpc.secure_channel(check_address(address), *_secured(tls, options))


def call(address: str, method: str, request: Any, deadline_s: float) -> Any:
    """Calls a method of a daemon by its unix socket, and returns the reply.

    Raises:
        ReftError: the call failed; see `error_of`.
    """
    try:
        with channel(address) as connection:
            return invoke(connection, method, request, deadline_s)
    except grpc.RpcError as error:
        raise error_of(error, address) from error


class DaemonCalls:
    """Calls methods of daemons; the calls before `close` share a connection to each daemon.

    A connection costs trainer and daemon about 1 ms of processor time each, so the calls of an
    attach share one. After `close` each call has its own, as by `call`: training keeps none open,
    because daemons limit connections, and a process that forks must not have gRPC at work. Until
    then only one thread may call.
    """

    def __init__(self) -> None:
        self._channels: dict[str, grpc.Channel] | None = {}

    @contextlib.contextmanager
    def channel(self, address: str) -> Iterator[grpc.Channel]:
        """Yields a channel to the daemon at a unix socket, for calls that raise grpc.RpcError."""
        channels = self._channels
        if channels is None:
            with channel(address) as own:
                yield own
            return
        if address not in channels:
            channels[address] = channel(address)
        try:
            yield channels[address]
        except grpc.RpcError as error:
            # A channel that has failed to connect fails all calls for up to a second, also after a
            # daemon was started.
            if isinstance(error_of(error, address), DaemonUnavailable):
                channels.pop(address).close()
            raise

    def call(self, address: str, method: str, request: Any, deadline_s: float) -> Any:
        """Calls a method of the daemon at a unix socket, and returns the reply.

        Raises:
            ReftError: the call failed; see `error_of`.
        """
        try:
            with self.channel(address) as connection:
                return invoke(connection, method, request, deadline_s)
        except grpc.RpcError as error:
            raise error_of(error, address) from error

    @contextlib.contextmanager
    def begun(self, address: str, method: str, request: Any, deadline_s: float) -> Iterator[None]:
        """Calls a method of the daemon while the block runs.

        The end of the block waits for the reply. The block calls no other method. Its error cancels
        the call.

        Raises:
            ReftError: the call failed; see `error_of`.
        """
        try:
            with self.channel(address) as connection, contextlib.ExitStack() as unless_done:
                reply = _method(connection, method, request).future(request, timeout=deadline_s)
                unless_done.callback(reply.cancel)
                yield
                unless_done.pop_all()
                reply.result()
        except grpc.RpcError as error:
            raise error_of(error, address) from error

    def close(self) -> None:
        """Closes the shared connections."""
        channels, self._channels = self._channels or {}, None
        for each in channels.values():
            each.close()


def invoke(connection: grpc.Channel, method: str, request: Any, deadline_s: float) -> Any:
    """Calls a method of a daemon over a channel, and returns the reply.

    Raises:
        grpc.RpcError: the call failed.
    """
    return _method(connection, method, request)(request, timeout=deadline_s)


def _method(connection: grpc.Channel, method: str, request: Any) -> Any:
    name, reply = method_of(pb_grpc.DaemonStub, method)
    # A stub would make an object for each method of the daemon.
    return connection.unary_unary(name, type(request).SerializeToString, reply.FromString)


def peer_channel(address: str, tls: Tls | None, apart: bool = False) -> grpc.aio.Channel:
    """Returns an asyncio channel to another daemon.

    Args:
        address: of the daemon.
        tls: None: without certificates.
        apart: whether the channel gets its own connection; gRPC would share one.
    """
    options = _options(address, apart)
    if tls is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(check_address(address), options=options)
    return grpc.aio.secure_channel(check_address(address), *_secured(tls, options))


def _secured(tls: Tls, options: _Options) -> tuple[grpc.ChannelCredentials, _Options]:
    """Returns credentials and options of a channel, which keeps the certificates of this moment.

    Only a daemon of the same user is called: the name in its certificate replaces the host's, which
    would say where a daemon runs, and not whose it is. Which of the user's daemons answers is what
    the job's proof shows.
    """
    key, cert, ca = tls.content
    name = ("grpc.ssl_target_name_override", tls.role.server_name)
    return grpc.ssl_channel_credentials(ca, key, cert), (*options, name)


def method_of(stub: type, name: str) -> tuple[str, type[Message]]:
    """Returns a method's full name, and the class of its replies.

    Args:
        stub: class of the service's stub.
        name: of the method.
    """
    method = pb.DESCRIPTOR.services_by_name[stub.__name__.removesuffix("Stub")].methods_by_name[name]
    return f"/{method.containing_service.full_name}/{name}", GetMessageClass(method.output_type)


def _options(address: str, apart: bool) -> _Options:
    own = ("grpc.use_local_subchannel_pool", int(apart))
    return (*OPTIONS, own, *(_LOCAL_OPTIONS if address.startswith("unix:") else _REMOTE_OPTIONS))


def says_protocol(metadata: object) -> bool:
    """Returns whether the metadata of a call has the caller's protocol."""
    return PROTOCOL_KEY in dict(metadata or ())  # type: ignore[call-overload]


def check_peer(metadata: object, who: str, ours: str) -> None:
    """Checks the protocol of a caller or of a replying daemon, by the metadata.

    Raises:
        AttachError: the sides have no protocol in common; see `messages.check_protocol`.
    """
    values = dict(metadata or ())  # type: ignore[call-overload]
    theirs, oldest = (str(values.get(key, unsaid)) for key, unsaid in ((PROTOCOL_KEY, SILENT), (OLDEST_KEY, 0)))
    is_number = theirs.isdecimal() and oldest.isdecimal()
    messages.check_protocol(*((int(theirs), int(oldest)) if is_number else (0, 0)), who, ours)
