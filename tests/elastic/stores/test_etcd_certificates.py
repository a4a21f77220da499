"""Certificates for etcd are replaced while a job runs.

A server that answers as etcd's gateway requires them.
"""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from reft.elastic.stores.etcd import connect
from reft.errors import ConfigError
from tests.support.certificates import Certificates, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


class Gateway(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"header": {"revision": "1"}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@contextmanager
def served(certificates: Certificates, authority: str, port: int = 0) -> Iterator[int]:
    """Serves on a port and yields it; clients need a certificate signed by the authority."""
    cert, key, ca = certificates.host(authority)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.load_verify_locations(ca)
    context.verify_mode = ssl.CERT_REQUIRED
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Gateway)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def parameters(certificates: Certificates, port: int, timeout_s: int) -> RendezvousParameters:
    cert, key, ca = map(str, certificates.agent("ours"))
    files = {"ca_cert": ca, "ssl_cert": cert, "ssl_cert_key": key}
    return RendezvousParameters("reft", f"etcd://127.0.0.1:{port}", "none", 1, 1, read_timeout=timeout_s, **files)


def test_new_certificates_are_read_when_the_old_ones_are_refused(tmp_path):
    certificates = Certificates(tmp_path)
    with served(certificates, "ours") as port:
        backend, _ = connect(parameters(certificates, port, 20), "job")
        assert backend.get_state() is None
    with served(certificates, "new", port):
        replaced = threading.Timer(0.5, certificates.replace, ["ours", "new"])
        replaced.start()  # until then the calls fail
        assert backend.get_state() is None
        replaced.join()


def test_wrong_certificates_are_an_error_after_the_timeout(tmp_path):
    certificates = Certificates(tmp_path)
    with (
        served(certificates, "theirs") as port,
        pytest.raises(RendezvousConnectionError, match=f"127.0.0.1:{port}.*SSL"),
    ):
        connect(parameters(certificates, port, 1), "job")


def test_unreadable_certificates_are_refused(tmp_path):
    certificates = Certificates(tmp_path)
    rendezvous_parameters = parameters(certificates, 1, 1)
    certificates.agent("ours")[1].write_text("no key")
    with pytest.raises(ConfigError, match="can't be read"):
        connect(rendezvous_parameters, "job")
