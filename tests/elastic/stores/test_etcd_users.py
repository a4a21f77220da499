"""Users of etcd: the password, what a role may read and write, and tokens that end."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStateError

from reft.elastic.stores import etcd
from reft.elastic.stores.etcd import Etcd, EtcdError, EtcdUser, Keys, connect
from reft.errors import ConfigError
from tests.support.etcd import EtcdCluster, why_not

PASSWORD = "a long password"


def parameters(endpoint: str, **options: object) -> RendezvousParameters:
    return RendezvousParameters("reft", endpoint, "none", 1, 1, read_timeout=5, **options)


class Gateway(http.server.BaseHTTPRequestHandler):
    """Answers as etcd's gateway does with users: each third call has a token that has ended."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.calls.append((self.path, self.headers.get("Authorization"), body))
        status, answer = 200, {"header": {"revision": "1"}}
        if self.path.endswith("authenticate"):
            answer = {"token": f"token-{len(self.server.calls)}"}
            if body != {"name": "trainer", "password": PASSWORD}:
                message = "etcdserver: authentication failed, invalid user ID or password"
                status, answer = 400, {"error": message, "code": 3}
        elif self.headers.get("Authorization") != self.server.token():
            status, answer = 401, {"error": "etcdserver: invalid auth token", "code": 16}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@contextmanager
def served() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    server.calls, server.ended = [], 0

    def token() -> str:
        """Returns the token of the last authentication that has not ended."""
        numbers = [i for i, call in enumerate(server.calls, 1) if call[0].endswith("authenticate")]
        return f"token-{max((each for each in numbers if each > server.ended), default=0)}"

    server.token = token
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_token_that_has_ended_is_renewed_and_the_password_is_sent_only_for_that():
    with served() as server:
        member = f"127.0.0.1:{server.server_address[1]}"
        client = Etcd([member], 5, user=EtcdUser("trainer", PASSWORD))
        for _ in range(2):
            assert client.call("kv/range", {})["header"]
        server.ended = len(server.calls)
        assert client.call("kv/range", {})["header"]
        paths = [path.rpartition("/")[2] for path, _, _ in server.calls]
        assert paths == ["authenticate", "range", "range", "range", "authenticate", "range"]
        assert not any(PASSWORD in str(call) for call in server.calls if not call[0].endswith("authenticate"))


def test_a_wrong_password_is_an_error_that_does_not_have_it():
    with served() as server:
        member = f"127.0.0.1:{server.server_address[1]}"
        with pytest.raises(RendezvousStateError, match="invalid user ID or password") as refused:
            connect(parameters(f"etcd://{member}", etcd_user="trainer"), "job", "wrong")
        assert "wrong" not in str(refused.value) and PASSWORD not in repr(EtcdUser("trainer", PASSWORD))


@pytest.mark.parametrize(
    ("options", "password", "text"),
    [
        ({"etcd_user": "trainer"}, "", "there is no REFT_ETCD_PASSWORD"),
        ({}, PASSWORD, "there is no etcd_user"),
        ({"etcd_user": "trainer"}, PASSWORD, "would travel in plain text"),
    ],
)
def test_half_a_user_or_a_password_in_plain_text_is_refused(options, password, text):
    with pytest.raises(ConfigError, match=text):
        connect(parameters("etcd://192.0.2.1:2379", **options), "job", password)


def test_an_answer_that_is_too_large_or_too_deep_is_no_answer(monkeypatch):
    monkeypatch.setattr(etcd, "ANSWER_MAX", 10)
    with served() as server:
        member = f"127.0.0.1:{server.server_address[1]}"
        with pytest.raises(Exception, match="10 are allowed"):
            Etcd([member], 0.1).call("auth/authenticate", {"name": "trainer", "password": PASSWORD})


# A real etcd


def post(cluster: EtcdCluster, path: str, **body: object) -> None:
    cluster._ask(0, f"v3/{path}", json.dumps(body))


def text(value: str) -> str:
    return base64.b64encode(value.encode()).decode()


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_role_reaches_the_keys_of_its_job_alone():
    with EtcdCluster(1) as cluster:
        for name, role in (("root", "root"), ("trainer", "job-a"), ("stranger", "job-b")):
            post(cluster, "auth/user/add", name=name, password=PASSWORD)
            post(cluster, "auth/role/add", name=role)
            if name != "root":
                prefix = f"{etcd.PREFIX}{role}/"
                end = prefix[:-1] + chr(ord("/") + 1)
                post(
                    cluster, "auth/role/grant", name=role,
                    perm={"permType": "READWRITE", "key": text(prefix), "range_end": text(end)},
                )  # fmt: skip
            post(cluster, "auth/user/grant", user=name, role=role)
        post(cluster, "auth/enable")
        backend, store = connect(parameters(cluster.endpoint, etcd_user="trainer"), "job-a", PASSWORD)
        state, token, is_ours = backend.set_state(b"state")
        assert is_ours and backend.get_state() == (state, token)
        store.set("key", b"value")
        assert store.get("key") == b"value" and store.add("number", 2) == 2 and store.delete_key("key")
        stranger = EtcdUser("stranger", PASSWORD)
        for user in (stranger, None):
            keys = Keys(Etcd(cluster.members, 5, user=user), "job-a", 60)
            for call in (lambda keys=keys: keys.get("state"), lambda keys=keys: keys.delete("state")):
                with pytest.raises(EtcdError, match=r"permission denied|user name is empty"):
                    call()
        cluster.kill(0)  # a restarted member has forgotten its tokens
        cluster.heal()
        assert backend.get_state() == (state, token)
