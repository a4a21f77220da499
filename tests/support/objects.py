"""An S3 server on loopback: moto's, whose requests can be refused, held or left without a reply."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "reft-tests",
    "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-tests",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}
HOLD_S = 30.0


@dataclass(frozen=True)
class ObjectRequest:
    """One request to the server.

    Attributes:
        method: of HTTP.
        key: of the object, below the bucket; empty: the bucket.
        query: behind the question mark.
    """

    method: str
    key: str
    query: str


class RequestCheck:
    """Answers nothing to a request: the server does. Tests override `before` and `after`."""

    def before(self, request: ObjectRequest) -> int:
        """Returns a status in place of the request's effect; 0: none; -1: hold the request."""
        return 0

    def after(self, request: ObjectRequest) -> int:
        """Returns a status in place of the reply, once the request has had its effect; 0: none."""
        return 0


@dataclass
class Refusal(RequestCheck):
    """Refuses requests.

    Attributes:
        status: the answer, see `RequestCheck`.
        matches: which requests.
        skip: so many are let through first.
        count: so many are refused then.
        is_late: whether the request has its effect, and only its reply is lost.
    """

    status: int
    matches: Callable[[ObjectRequest], bool] = lambda request: True
    skip: int = 0
    count: int = 1 << 30
    is_late: bool = False

    def _status(self, request: ObjectRequest) -> int:
        if not self.matches(request):
            return 0
        self.skip -= 1
        if self.skip >= 0 or self.count <= 0:
            return 0
        self.count -= 1
        return self.status

    def before(self, request: ObjectRequest) -> int:
        return 0 if self.is_late else self._status(request)

    def after(self, request: ObjectRequest) -> int:
        return self._status(request) if self.is_late else 0


class QuietHandler(WSGIRequestHandler):
    """Logs no request."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


@dataclass
class ObjectServer:
    """The server, and what it was asked.

    Attributes:
        check: may refuse requests.
        requests: all so far.
        released: lets held requests go.
    """

    check: RequestCheck = field(default_factory=RequestCheck)
    requests: list[ObjectRequest] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def __post_init__(self) -> None:
        self._application = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True, request_handler=QuietHandler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        key = environ["PATH_INFO"].lstrip("/").partition("/")[2]
        request = ObjectRequest(environ["REQUEST_METHOD"], key, environ["QUERY_STRING"])
        self.requests.append(request)
        status = self.check.before(request)
        if status < 0:
            self.released.wait(HOLD_S)
            status = 503
        if not status:
            replies: list[tuple[Any, ...]] = []
            body = b"".join(self._application(environ, lambda *reply: replies.append(reply)))
            status = self.check.after(request)
            if not status:
                start_response(*replies[0])
                return [body]
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(f"{status} Refused", [("Content-Type", "application/xml")])
        return [b"<Error><Code>Refused</Code><Message>the-signature-of-the-request</Message></Error>"]

    def client(self) -> Any:
        """Returns a plain client; `check` sees its requests too."""
        return boto3.client(
            "s3", endpoint_url=self.url, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
        )

    def new_bucket(self) -> str:
        """Makes an empty bucket; returns its name."""
        name = f"bucket-{secrets.token_hex(8)}"  # the servers of a process share their state
        self.client().create_bucket(Bucket=name)
        return name

    def keys(self, bucket: str) -> list[str]:
        """Returns the keys of all objects of a bucket."""
        return [each["Key"] for each in self.client().list_objects_v2(Bucket=bucket).get("Contents", [])]

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """Runs a server; processes that are started meanwhile find it by their environment."""
    server = ObjectServer()
    earlier = {name: os.environ.get(name) for name in (*ENVIRONMENT, "AWS_ENDPOINT_URL")}
    os.environ.update(ENVIRONMENT, AWS_ENDPOINT_URL=server.url)
    try:
        yield server
    finally:
        server.close()
        for name, value in earlier.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
