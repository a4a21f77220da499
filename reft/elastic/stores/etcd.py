"""--rdzv-endpoint=etcd://h1:2379,h2:2379,h3:2379: the rendezvous in etcd v3, which no single host's loss takes away.

    EtcdBackend   the job's state        ─┐             ┌─► h1 ┐
    EtcdStore     what agents tell one    ├─► Etcd ─────┼─► h2 ├ one etcd, by its JSON gateway (POST /v3/kv/…)
                  another in a round     ─┘             └─► h3 ┘

The Python clients of etcd are not maintained, and the gateway needs the standard library alone. Workers keep torch's own
TCPStore, which the agent of rank 0 makes for every round.

1. A call is repeated at the next member until one answers, for `read_timeout` seconds. So a write may be done twice:
   each is a transaction that the second time changes nothing and answers as the first time.
2. All keys of a job hang on one lease, whose number follows from the job's name; any agent keeps it alive. When all have
   been silent for `etcd_ttl` seconds, etcd forgets the job.
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
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from reft.elastic.options import number, text
from reft.errors import ConfigError

SCHEME = "etcd://"
PREFIX = "/reft/rendezvous/"
CALL_S = 2.0  # for one member; a leader's loss takes etcd about one second
PAUSE_S = 0.1
ENDING = (1, 14)  # gRPC's cancelled and unavailable: what a member says of calls that it cuts off when it is stopped
LEASE_LOST = "requested lease not found"
LEASE_EXISTS = "lease already exists"
VALUE_SHOWN = 64  # bytes of a wrong value that an error shows


class EtcdError(Exception):
    """etcd answered, and refused."""


class Etcd:
    """The calls that are needed.

    Args:
        members: host:port of each; the first that answers is used until it does not.
        timeout_s: how long a call may take, all members and repetitions included.
        tls: reads the certificates, which may be replaced while the job runs: whenever a call has failed, they are read
            again. None, or what returns None, means plain text.

    Raises:
        ConfigError: the certificates can't be read.
    """

    def __init__(
        self, members: Sequence[str], timeout_s: float, tls: Callable[[], ssl.SSLContext | None] | None = None
    ) -> None:
        self._members, self._timeout_s, self._read_tls = list(members), timeout_s, tls or (lambda: None)
        self._tls = self._read_tls()

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to POST /v3/`path`.

        Raises:
            EtcdError: etcd refuses.
            RendezvousConnectionError: no member answers in time.
        """
        end = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._ask(self._members[0], path, body)
            except (OSError, http.client.HTTPException, ValueError) as error:
                if time.monotonic() > end:
                    raise RendezvousConnectionError(
                        f"no member of etcd answers within {self._timeout_s:.0f} s: {', '.join(self._members)}; "
                        f"the last said {error!r}."
                    ) from error
            self._members.append(self._members.pop(0))
            with contextlib.suppress(ConfigError):  # they are just being replaced
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
            connection.request("POST", f"/v3/{path}", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            data = json.loads(answer.read())
        finally:
            connection.close()
        if answer.status == 200:
            return dict(data)
        said = str(data.get("error") or data.get("message"))
        passing = answer.status >= 500 or data.get("code") in ENDING
        if passing or "no leader" in said or "leader changed" in said or "timed out" in said:
            raise OSError(said)  # another member may answer, or this one soon
        raise EtcdError(said)


class Keys:
    """The keys of one job.

    Args:
        etcd: holds them.
        job: their prefix.
        ttl_s: after which they vanish once nobody uses them.
    """

    def __init__(self, etcd: Etcd, job: str, ttl_s: int) -> None:
        self._etcd, self._prefix, self._ttl_s = etcd, f"{PREFIX}{job}/", ttl_s
        # 63 bits, never 0: by its number all agents mean the same lease.
        self._lease = int.from_bytes(hashlib.blake2b(job.encode(), digest_size=8).digest(), "big") >> 1 | 1
        self._renewed_s = float("-inf")

    def get(self, key: str) -> tuple[bytes, int] | None:
        """The value and the revision at which it was written; None if there is none."""
        found = self._etcd.call("kv/range", {"key": self._name(key)}).get("kvs")
        return (_bytes(found[0].get("value", "")), int(found[0]["mod_revision"])) if found else None

    def put_if(self, key: str, value: bytes, revision: int) -> tuple[bytes, int, bool]:
        """Writes if the key was last written at `revision` (0: never): what it holds now, since when, and whether it is ours."""
        name = self._name(key)
        compare = [{"key": name, "target": "MOD", "result": "EQUAL", "modRevision": str(revision)}]
        done = self._txn(compare, [self._put(name, value)], [{"requestRange": {"key": name}}])
        if done.get("succeeded"):
            return value, int(done["header"]["revision"]), True
        found = done["responses"][0]["response_range"].get("kvs")
        if not found:
            return b"", 0, False
        now = _bytes(found[0].get("value", ""))
        # Equal: a first try was done, and its answer lost.
        return now, int(found[0]["mod_revision"]), now == value

    def put(self, key: str, value: bytes) -> None:
        """Writes, whatever was there."""
        self._txn([], [self._put(self._name(key), value)], [])

    def add(self, key: str, amount: int) -> int:
        """The number that the key holds, after adding to it."""
        name, mark = self._name(key), self._name(f"{key}#{secrets.token_hex(8)}")
        while True:
            value, revision = self.get(key) or (b"0", 0)
            total = str(self._number(key, value) + amount).encode()
            compare = [
                {"key": name, "target": "MOD", "result": "EQUAL", "modRevision": str(revision)},
                {"key": mark, "target": "CREATE", "result": "EQUAL", "createRevision": "0"},
            ]
            done = self._txn(
                compare, [self._put(name, total), self._put(mark, total)], [{"requestRange": {"key": mark}}]
            )
            if done.get("succeeded"):
                return int(total)
            marked = done["responses"][0]["response_range"].get("kvs")
            if marked:  # a first try was done, and its answer lost
                return int(_bytes(marked[0]["value"]))

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
        """Whether there was one."""
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
        """Makes the job's lease, or makes it last; seldom."""
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
        return _refused(self._keys.get, "state")

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        try:
            before = int(token or 0)
        except (TypeError, ValueError):  # no token of ours: the state is not what its owner thinks, so it is not set
            found = self.get_state()
            return None if found is None else (*found, False)
        now, revision, is_ours = _refused(self._keys.put_if, "state", state, before)
        return (now, revision, is_ours) if revision else None


class EtcdStore(Store):
    """What agents tell one another in a round, as torch's stores do it."""

    def __init__(self, keys: Keys, timeout: timedelta) -> None:
        super().__init__()
        self._keys, self._timeout = keys, timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` wait."""
        self._timeout = timeout

    def set(self, key: str, value: bytes | str) -> None:
        self._keys.put(f"store/{key}", value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        found = self._keys.get(f"store/{key}")
        return found[0] if found else b""

    def add(self, key: str, amount: int) -> int:
        return self._keys.add(f"store/{key}", amount)

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._keys.get(f"store/{key}") is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        end = time.monotonic() + (timeout or self._timeout).total_seconds()
        left = list(keys)
        while left:
            if self.check(left[:1]):
                left.pop(0)
            elif time.monotonic() > end:
                raise DistStoreError(f"nobody wrote {left[0]} within {timeout or self._timeout}.")
            else:
                time.sleep(PAUSE_S)

    def delete_key(self, key: str) -> bool:
        return self._keys.delete(f"store/{key}")


def connect(parameters: RendezvousParameters, rendezvous_id: str) -> tuple[EtcdBackend, Store]:
    """The backend for an endpoint etcd://…, and a store for the agents.

    Raises:
        ConfigError: the endpoint names no members, or TLS is named in part.
        RendezvousConnectionError: none answers.
    """
    members = [part.strip() for part in parameters.endpoint.removeprefix(SCHEME).split(",") if part.strip()]
    if not members or any(not member.rpartition(":")[2].isdigit() for member in members):
        raise ConfigError(
            f"--rdzv-endpoint={parameters.endpoint} names no members of etcd.", "etcd://HOST:2379,HOST:2379"
        )
    timeout_s = number(parameters, "read_timeout")
    keys = Keys(Etcd(members, timeout_s, lambda: _tls(parameters)), rendezvous_id, number(parameters, "etcd_ttl"))
    _refused(keys.get, "state")  # an error now is better than one in the first round
    return EtcdBackend(keys), EtcdStore(keys, timedelta(seconds=timeout_s))


def _tls(parameters: RendezvousParameters) -> ssl.SSLContext | None:
    ca, cert, key = (text(parameters, name) for name in ("ca_cert", "ssl_cert", "ssl_cert_key"))
    if not ca:
        if cert or key:
            raise ConfigError("--rdzv-conf has ssl_cert or ssl_cert_key without ca_cert.", "give ca_cert too")
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert:
            context.load_cert_chain(cert, key or None)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"etcd's certificates can't be read: {error}.", "check ca_cert, ssl_cert, ssl_cert_key"
        ) from error
    return context


def _refused(function: Any, *arguments: Any) -> Any:
    """What `function` returns; what etcd refuses becomes an error of the rendezvous."""
    try:
        return function(*arguments)
    except EtcdError as error:
        raise RendezvousStateError(f"etcd refuses: {error}.") from error


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(data: str) -> bytes:
    return base64.b64decode(data)
