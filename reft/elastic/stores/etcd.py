"""--rdzv-endpoint=etcd://h1:2379,h2:2379,h3:2379: the rendezvous state in etcd v3.

    EtcdBackend   the job's state      ─┐             ┌─► h1 ┐
    EtcdStore     what agents exchange  ├─► Etcd ─────┼─► h2 ├ one etcd, by its JSON gateway
                  in a round           ─┘             └─► h3 ┘   (POST /v3/kv/…)

The rendezvous survives the loss of any single host. The Python clients of etcd are not maintained,
and the gateway needs only the standard library. Workers keep torch's own TCPStore, which the agent
of rank 0 makes for every round.

1. A call is repeated at the next member until a member answers, for `read_timeout` seconds. So a
   write may be done twice. Each write is a transaction: the second one changes nothing and gives
   the answer of the first one.
2. All keys of a job belong to one lease. The lease's number follows from the job's name, and every
   agent keeps the lease alive. If no agent did so for `etcd_ttl` seconds, etcd deletes the keys.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import secrets
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from reft.elastic.bounded_json import parse
from reft.elastic.options import number, text
from reft.errors import ConfigError
from reft.wire.rpc import is_loopback

SCHEME = "etcd://"
PREFIX = "/reft/rendezvous/"
CALL_S = 2.0  # for one member; after the loss of its leader etcd needs about one second
PAUSE_S = 0.1
ENDING = (1, 14)  # gRPC codes cancelled and unavailable: a member that is being stopped answers so
# Known by their text: the code of too many requests is also that of a database without space.
TEMPORARY = ("no leader", "leader changed", "timed out", "too many requests")
LEASE_LOST = "requested lease not found"
LEASE_EXISTS = "lease already exists"
VALUE_SHOWN = 64  # bytes of a wrong value that an error shows


ANSWER_MAX = 64 << 20  # bytes of one answer, in which values are base64
ANSWER_DEPTH_MAX = 8
TOKEN_LOST = ("invalid auth token", "revision of auth store is old")


class EtcdError(Exception):
    """etcd answered, and refused the call."""


@dataclass(frozen=True)
class EtcdUser:
    """A user of etcd; its roles say which keys it may read and write."""

    name: str
    password: str = field(repr=False)


class Etcd:
    """Calls to etcd's JSON gateway.

    Args:
        members: host:port of each member. The first member that answers is used until it fails.
        timeout_s: how long a call may take, with all members and repetitions.
        tls: reads the certificates. They are read again after every failed call, because they may
            be replaced while the job runs. None, or a function that returns None: plain text.
        user: None: etcd asks for no user.

    Raises:
        ConfigError: the certificates can't be read.
    """

    def __init__(
        self,
        members: Sequence[str],
        timeout_s: float,
        tls: Callable[[], ssl.SSLContext | None] | None = None,
        user: EtcdUser | None = None,
    ) -> None:
        self._members, self._timeout_s, self._read_tls = list(members), timeout_s, tls or (lambda: None)
        self._tls = self._read_tls()
        self._user, self._token = user, ""

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to POST /v3/`path`.

        Raises:
            EtcdError: etcd refuses.
            RendezvousConnectionError: no member answers in time.
        """
        end = time.monotonic() + self._timeout_s
        while True:
            try:
                if self._user is not None and not self._token:
                    login = {"name": self._user.name, "password": self._user.password}
                    self._token = str(self._ask(self._members[0], "auth/authenticate", login)["token"])
                return self._ask(self._members[0], path, body)
            except EtcdError as error:
                # A token ends when it is unused, and when a member restarts.
                is_lost = self._token and any(text in str(error) for text in TOKEN_LOST)
                if not is_lost or time.monotonic() > end:
                    raise
                self._token = ""
            except (OSError, http.client.HTTPException, ValueError) as error:
                if time.monotonic() > end:
                    raise RendezvousConnectionError(
                        f"no member of etcd answers within {self._timeout_s:.0f} s: {', '.join(self._members)}; "
                        f"the last error was {error!r}."
                    ) from error
            self._members.append(self._members.pop(0))
            with contextlib.suppress(ConfigError):  # the files are just being replaced
                self._tls = self._read_tls()
            time.sleep(PAUSE_S)

    def _ask(self, member: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if self._tls:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                member, timeout=CALL_S, context=self._tls
            )
        else:
            connection = http.client.HTTPConnection(member, timeout=CALL_S)
        try:
            headers = {"Content-Type": "application/json"} | ({"Authorization": self._token} if self._token else {})
            connection.request("POST", f"/v3/{path}", json.dumps(body), headers)
            answer = connection.getresponse()
            data = parse(answer.read(ANSWER_MAX + 1), ANSWER_MAX, ANSWER_DEPTH_MAX)
        finally:
            connection.close()
        if answer.status == 200:
            return dict(data)
        message = str(data.get("error") or data.get("message"))
        is_temporary = answer.status >= 500 or data.get("code") in ENDING
        if is_temporary or any(text in message for text in TEMPORARY):
            raise OSError(message)  # the call is repeated at the next member
        raise EtcdError(message)


class Keys:
    """The keys of one job.

    Args:
        etcd: the etcd that holds the keys.
        job: prefix of the keys.
        ttl_s: etcd deletes the keys after so many seconds without use.
    """

    def __init__(self, etcd: Etcd, job: str, ttl_s: int) -> None:
        self._etcd, self._prefix, self._ttl_s = etcd, f"{PREFIX}{job}/", ttl_s
        # 63 bits, never 0. All agents compute the same number, and so use the same lease.
        self._lease = int.from_bytes(hashlib.blake2b(job.encode(), digest_size=8).digest(), "big") >> 1 | 1
        self._renewed_s = float("-inf")

    def get(self, key: str) -> tuple[bytes, int] | None:
        """Returns the value, and the revision of its last write.

        The result is None if there is no such key.
        """
        entries = self._etcd.call("kv/range", {"key": self._name(key)}).get("kvs")
        return (_bytes(entries[0].get("value", "")), int(entries[0]["mod_revision"])) if entries else None

    def put_if(self, key: str, value: bytes, revision: int) -> tuple[bytes, int, bool]:
        """Writes the value if the key was last written at `revision` (0: never written).

        Returns the key's value now, its revision, and whether that value is ours.
        """
        name = self._name(key)
        compare = [{"key": name, "target": "MOD", "result": "EQUAL", "modRevision": str(revision)}]
        answer = self._txn(compare, [self._put(name, value)], [{"requestRange": {"key": name}}])
        if answer.get("succeeded"):
            return value, int(answer["header"]["revision"]), True
        entries = answer["responses"][0]["response_range"].get("kvs")
        if not entries:
            return b"", 0, False
        held_value = _bytes(entries[0].get("value", ""))
        # Equal values: an earlier try was written, and its answer was lost.
        return held_value, int(entries[0]["mod_revision"]), held_value == value

    def put(self, key: str, value: bytes) -> None:
        """Writes the value over any earlier value."""
        self._txn([], [self._put(self._name(key), value)], [])

    def add(self, key: str, amount: int) -> int:
        """Adds to the number that the key holds, and returns the sum.

        Raises:
            RendezvousStateError: the key holds no number.
        """
        name, mark = self._name(key), self._name(f"{key}#{secrets.token_hex(8)}")
        while True:
            value, revision = self.get(key) or (b"0", 0)
            total = str(self._number(key, value) + amount).encode()
            compare = [
                {"key": name, "target": "MOD", "result": "EQUAL", "modRevision": str(revision)},
                {"key": mark, "target": "CREATE", "result": "EQUAL", "createRevision": "0"},
            ]
            answer = self._txn(
                compare, [self._put(name, total), self._put(mark, total)], [{"requestRange": {"key": mark}}]
            )
            if answer.get("succeeded"):
                return int(total)
            entries = answer["responses"][0]["response_range"].get("kvs")
            if entries:  # an earlier try was written, and its answer was lost
                return int(_bytes(entries[0]["value"]))

    def _number(self, key: str, value: bytes) -> int:
        """Returns a counter's value.

        Raises:
            RendezvousStateError: the value is no number.
        """
        try:
            return int(value)
        except ValueError as error:
            name = f"{self._prefix}{key}"
            raise RendezvousStateError(
                f"etcd holds {value[:VALUE_SHOWN]!r} under the counter key {name}, which is no number: another program wrote "
                f"there. End the job's agents, run `etcdctl del '{name}'`, and start the job again."
            ) from error

    def delete(self, key: str) -> bool:
        """Deletes the key, and returns whether there was one."""
        return int(self._etcd.call("kv/deleterange", {"key": self._name(key)}).get("deleted", 0)) > 0

    def _txn(self, compare: list[Any], success: list[Any], failure: list[Any]) -> dict[str, Any]:
        self._renew()
        body = {"compare": compare, "success": success, "failure": failure}
        try:
            return self._etcd.call("kv/txn", body)
        except EtcdError as error:
            if LEASE_LOST not in str(error):
                raise
        self._renewed_s = float("-inf")
        self._renew()
        return self._etcd.call("kv/txn", body)

    def _renew(self) -> None:
        """Makes the job's lease or keeps it alive.

        It does so at most once in a third of the lease's time.
        """
        if time.monotonic() - self._renewed_s < self._ttl_s / 3:
            return
        try:
            self._etcd.call("lease/grant", {"ID": str(self._lease), "TTL": str(self._ttl_s)})
        except EtcdError as error:
            if LEASE_EXISTS not in str(error):
                raise
            self._etcd.call("lease/keepalive", {"ID": str(self._lease)})
        self._renewed_s = time.monotonic()

    def _name(self, key: str) -> str:
        return _base64((self._prefix + key).encode())

    def _put(self, name: str, value: bytes) -> dict[str, Any]:
        return {"requestPut": {"key": name, "value": _base64(value), "lease": str(self._lease)}}


class EtcdBackend(RendezvousBackend):
    """The job's state under one key."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    @property
    def name(self) -> str:
        return "reft"

    def get_state(self) -> tuple[bytes, Any] | None:
        return _translate_errors(self._keys.get, "state")

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        try:
            expected_revision = int(token or 0)
        except (TypeError, ValueError):
            # The token is not from this backend, so the caller does not know the current state.
            # Nothing is written.
            current = self.get_state()
            return None if current is None else (*current, False)
        held_state, revision, is_ours = _translate_errors(self._keys.put_if, "state", state, expected_revision)
        return (held_state, revision, is_ours) if revision else None


class EtcdStore(Store):
    """The values that agents exchange in a round, as a store of torch."""

    def __init__(self, keys: Keys, timeout: timedelta) -> None:
        super().__init__()
        self._keys, self._timeout = keys, timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long `get` and `wait` wait."""
        self._timeout = timeout

    def set(self, key: str, value: bytes | str) -> None:
        self._keys.put(f"store/{key}", value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        entry = self._keys.get(f"store/{key}")
        return entry[0] if entry else b""

    def add(self, key: str, amount: int) -> int:
        return self._keys.add(f"store/{key}", amount)

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._keys.get(f"store/{key}") is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        end = time.monotonic() + (timeout or self._timeout).total_seconds()
        missing = list(keys)
        while missing:
            if self.check(missing[:1]):
                missing.pop(0)
            elif time.monotonic() > end:
                raise DistStoreError(f"no agent wrote {missing[0]} within {timeout or self._timeout}.")
            else:
                time.sleep(PAUSE_S)

    def delete_key(self, key: str) -> bool:
        return self._keys.delete(f"store/{key}")


def connect(parameters: RendezvousParameters, rendezvous_id: str, password: str = "") -> tuple[EtcdBackend, Store]:
    """Returns the backend for an endpoint etcd://…, and a store for the agents.

    Args:
        parameters: of the rendezvous.
        rendezvous_id: separates the job from other jobs.
        password: of the user that the option etcd_user names.

    Raises:
        ConfigError: the endpoint names no members, or TLS options or the password are missing.
        RendezvousConnectionError: no member answers.
    """
    members = [part.strip() for part in parameters.endpoint.removeprefix(SCHEME).split(",") if part.strip()]
    if not members or any(not member.rpartition(":")[2].isdecimal() for member in members):
        raise ConfigError(
            f"--rdzv-endpoint={parameters.endpoint} does not name members of etcd.",
            "use etcd://HOST:2379,HOST:2379",
        )
    timeout_s = number(parameters, "read_timeout")
    server = Etcd(members, timeout_s, lambda: _tls(parameters), _user(parameters, members, password))
    keys = Keys(server, rendezvous_id, number(parameters, "etcd_ttl"))
    _translate_errors(keys.get, "state")  # so that an error is raised now and not in the first round
    return EtcdBackend(keys), EtcdStore(keys, timedelta(seconds=timeout_s))


def _user(parameters: RendezvousParameters, members: Sequence[str], password: str) -> EtcdUser | None:
    """Returns the user that the options name.

    Raises:
        ConfigError: only one of name and password is given, or the password would travel in plain
            text.
    """
    name = text(parameters, "etcd_user")
    if bool(name) != bool(password):
        has, lacks = ("etcd_user", "REFT_ETCD_PASSWORD") if name else ("REFT_ETCD_PASSWORD", "etcd_user")
        raise ConfigError(f"a user of etcd is given by {has}, but there is no {lacks}.", f"set {lacks}")
    if not name:
        return None
    is_near = all(is_loopback(member.rpartition(":")[0].strip("[]")) for member in members)
    if not text(parameters, "ca_cert") and not is_near:
        raise ConfigError("the password of etcd_user would travel in plain text.", "add ca_cert")
    return EtcdUser(name, password)


def _tls(parameters: RendezvousParameters) -> ssl.SSLContext | None:
    ca, cert, key = (text(parameters, name) for name in ("ca_cert", "ssl_cert", "ssl_cert_key"))
    if not ca:
        if cert or key:
            raise ConfigError("--rdzv-conf has ssl_cert or ssl_cert_key, but no ca_cert.", "add ca_cert")
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert:
            context.load_cert_chain(cert, key or None)
    except OSError as error:  # includes ssl.SSLError
        raise ConfigError(
            f"etcd's certificates can't be read: {error}.", "check ca_cert, ssl_cert, ssl_cert_key"
        ) from error
    return context


def _translate_errors(function: Any, *arguments: Any) -> Any:
    """Returns the result of `function`; turns an EtcdError into an error of the rendezvous."""
    try:
        return function(*arguments)
    except EtcdError as error:
        raise RendezvousStateError(f"etcd refuses: {error}.") from error


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(data: str) -> bytes:
    return base64.b64decode(data)
