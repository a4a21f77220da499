"""A member of etcd that is being stopped answers with errors. Then the next member is asked."""

from __future__ import annotations

import http.server
import json
import threading

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from reft.elastic.stores.etcd import Etcd, EtcdError


class Member(http.server.BaseHTTPRequestHandler):
    answer: tuple[int, bytes] = (200, b'{"from": "the next"}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status, body = self.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture
def start():
    servers = []

    def start(status: int, body: bytes) -> str:
        member = type("Answering", (Member,), {"answer": (status, body)})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), member)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
        servers.append(server)
        return f"127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def refusal(message: str, code: int) -> bytes:
    return json.dumps({"error": message, "message": message, "code": code}).encode()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (503, refusal("transport is closing", 14)),
        (503, refusal("etcdserver: server stopped", 14)),
        (500, refusal("etcdserver: unhealthy cluster", 2)),
        (408, refusal("grpc: the client connection is closing", 1)),  # seen from a real etcd
        (502, b"<html>a proxy</html>"),
        (429, refusal("etcdserver: too many requests", 8)),
    ],
)
def test_the_next_member_is_asked(start, status, body):
    stopping, other = start(status, body), start(*Member.answer)
    assert Etcd([stopping, other], timeout_s=20).call("kv/range", {}) == {"from": "the next"}
    with pytest.raises(RendezvousConnectionError, match=r"no member of etcd answers within 0 s"):
        Etcd([stopping], timeout_s=0).call("kv/range", {})


@pytest.mark.parametrize(
    ("status", "text", "code"),
    [(404, "requested lease not found", 5), (429, "etcdserver: mvcc: database space exceeded", 8)],
)
def test_a_refusal_is_not_repeated(start, status, text, code):
    with pytest.raises(EtcdError, match=text):
        Etcd([start(status, refusal(text, code))], timeout_s=20).call("kv/txn", {})
