"""Mutual TLS between nodes, with certificates that may be replaced while jobs run.

    files ─► a thread, every REREAD_S and on request ─► the newest contents that fit together
                                                            ▲       ▲
        an accepted connection: asked at each handshake ────┘       │
        a made connection: asked when the connection is made ───────┘
        (`generation` says whether the contents have changed)

Existing connections continue. Files that can't be read, or do not fit together, change nothing and
are logged. So files may be replaced one after the other. Only the thread reads files: files on a
file system that hangs must not silence a node.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import ssl
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from reft.errors import ConfigError
from reft.log_lines import audit
from reft.wire.certificate_role import REMEDY, Role, role_of

log = logging.getLogger("reft")
REREAD_S: Final = 60.0
DAY_S: Final = 86_400.0
SOON_S: Final = 14 * DAY_S  # before its end a certificate is complained of; a short one in its last tenth
_KINDS: Final = (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
_NO_CHECK_TIME: Final = ssl.VerifyFlags(0x200000)  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL


class Tls:
    """One side of mutual TLS: the node's certificate and key, and the authorities of all nodes.

    Args:
        cert: PEM file, of this node.
        key: PEM file, its key; not encrypted.
        ca: PEM file, one or more authorities.

    Raises:
        ConfigError: a file can't be read, or the files do not fit together.
    """

    def __init__(self, cert: Path, key: Path, ca: Path) -> None:
        self._files = _CertificateFiles(cert, key, ca)
        # The thread must not hold this object. Otherwise a dropped Tls would never end its thread.
        weakref.finalize(self, self._files.end).atexit = False

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        """Returns the files of certificate, key and authorities."""
        return self._files.paths

    @property
    def generation(self) -> int:
        """Returns how often the contents of the files have changed."""
        return self._files.generation

    def watch(self) -> None:
        """Starts a thread that rereads the files; it ends with this object or the process."""
        threading.Thread(target=self._files.watch, name="reft-tls", daemon=True).start()

    def reread(self) -> None:
        """Makes the thread read the files now. Returns at once."""
        self._files.wake.set()

    @property
    def role(self) -> Role:
        """Returns for whom the certificate was made. Replaced files never change this."""
        return self._files.role

    def server_context(self) -> ssl.SSLContext:
        """Returns a context for accepted sockets, of the newest contents.

        It is the same object until the contents change. The other side must have a certificate of
        the same authorities; what that certificate's role may do is the caller's to ask.
        """
        return self._files.content.server

    def client_context(self) -> ssl.SSLContext:
        """Returns a context for made sockets; the caller must look at the server's role."""
        return self._files.content.client

    @property
    def content(self) -> tuple[bytes, bytes, bytes]:
        """Returns key, certificate and authorities, as gRPC takes them."""
        content = self._files.content
        return content.key, content.cert, content.ca


@dataclass(frozen=True)
class _Content:
    """The contents of the three files at one moment, and what was made of them.

    Attributes:
        key: the PEM text.
        cert: the PEM text.
        ca: the PEM text.
        role: for whom the certificate was made.
        sha256: fingerprint of the certificate.
        not_before: from when on the certificate counts.
        not_after: when the certificate ends.
        server: for accepted sockets.
        client: for made sockets.
    """

    key: bytes
    cert: bytes
    ca: bytes
    role: Role = field(compare=False)
    sha256: str = field(compare=False)
    not_before: str = field(compare=False)
    not_after: str = field(compare=False)
    server: ssl.SSLContext = field(compare=False)
    client: ssl.SSLContext = field(compare=False)


class _CertificateFiles:
    """The three files, and their newest contents that fit together.

    Attributes:
        paths: of certificate, key and authorities.
        content: of the files.
        role: for whom the certificate was made; the same for the life of this object.
        generation: how often the contents have changed.
        wake: set to read the files now.
    """

    def __init__(self, cert: Path, key: Path, ca: Path) -> None:
        self.paths = cert, key, ca
        self.content = self._read()
        self.role = self.content.role
        self.generation = 0
        self.wake = threading.Event()
        self._is_ended = False
        self._said_age = ""

    def end(self) -> None:
        """Ends `watch`. Returns at once."""
        self._is_ended = True
        self.wake.set()

    def watch(self) -> None:
        """Rereads the files every REREAD_S and at each `wake`, until `end`."""
        logged = ""
        while True:
            self._say_age(time.time())
            self.wake.wait(REREAD_S)
            self.wake.clear()
            if self._is_ended:  # asked after `clear`, so that an `end` meanwhile wakes the next wait
                return
            try:
                content = self._read()
                self._check_role(content.role)
            except ConfigError as error:
                if str(error) != logged:
                    log.error("the certificates stay as they were: %s", error)
                logged = str(error)
                continue
            logged = ""
            if content != self.content:
                self.content = content
                self.generation += 1
                self._audit_change()

    def _audit_change(self) -> None:
        cert, key, ca = self.paths
        content = self.content
        audit(
            "certificates changed", cert=cert, key=key, ca=ca, role=content.role, sha256=content.sha256,
            not_after=content.not_after,
        )  # fmt: skip

    def _say_age(self, now_s: float) -> None:
        """Logs that other nodes refuse this certificate, or soon will; again as time runs out."""
        words = age_words(self.content.not_before, self.content.not_after, now_s)
        if words not in ("", self._said_age):
            log.error("%s %s Fix: %s; it is read within a minute", self.paths[0], words, REMEDY)
        self._said_age = words

    def _check_role(self, role: Role) -> None:
        if role != self.role:
            raise ConfigError(
                f"{self.paths[0]} is now of the {role}; this process began as the {self.role}.",
                "restart the process, or put its own certificate there",
            )

    def _read(self) -> _Content:
        try:
            cert, key, ca = (path.read_bytes() for path in self.paths)
            with _file_of(cert) as cert_file, _file_of(key) as key_file, _file_of(ca) as ca_file:
                server, client = (_context(kind, cert_file, key_file) for kind in _KINDS)
                for context in (server, client):
                    context.load_verify_locations(ca_file)
                    context.verify_mode = ssl.CERT_REQUIRED
                decoded, der = _decode(cert_file, key_file)
        except OSError as error:  # ssl.SSLError is one
            names = " and ".join((", ".join(map(str, self.paths[:2])), str(self.paths[2])))
            raise ConfigError(
                f"{names} can't be used for TLS: {error}.", "check --tls-cert, --tls-key and --tls-ca"
            ) from error
        role = role_of(decoded)
        if role is None or decoded is None:
            raise ConfigError(f"{self.paths[0]} names no user (reft://user/NAME), or several.", REMEDY)
        sha256 = hashlib.sha256(der).hexdigest()
        not_before, not_after = str(decoded["notBefore"]), str(decoded["notAfter"])
        return _Content(key, cert, ca, role, sha256, not_before, not_after, server, client)


def age_words(not_before: str, not_after: str, now_s: float) -> str:
    """Returns why a certificate does not count now, or not for long; else empty.

    Args:
        not_before: from when on it counts, as Python decodes certificates.
        not_after: when it ends.
        now_s: the time.
    """
    begin_s, end_s = ssl.cert_time_to_seconds(not_before), ssl.cert_time_to_seconds(not_after)
    left_s = end_s - now_s
    if now_s < begin_s:
        return f"counts from {not_before} on: other nodes refuse it until then. Is the clock of this machine right?"
    if left_s <= 0:
        return f"has ended at {not_after}: other nodes refuse it, and no snapshot becomes whole."
    if left_s < min(SOON_S, (end_s - begin_s) / 10):
        left = f"{left_s // DAY_S:.0f} days" if left_s >= 2 * DAY_S else f"{left_s // 3600:.0f} h"
        return f"ends at {not_after}, in {left}: other nodes refuse it then."
    return ""


@contextlib.contextmanager
def _file_of(content: bytes) -> Iterator[str]:
    """Yields the path of an unnamed file in memory.

    Python reads keys from files only. The files on disk may be replaced between two looks at them.
    """
    with open(os.memfd_create("reft-tls", os.MFD_CLOEXEC), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _context(kind: int, cert_file: str, key_file: str) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert_file, key_file, password=_refuse)
    context.set_alpn_protocols(["h2"])
    context.check_hostname = False  # of a server its role is looked at
    # Each connection proves anew who calls: the certificate may have been replaced, or be too old.
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    if kind == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    return context


def _decode(cert_file: str, key_file: str) -> tuple[dict[str, Any] | None, bytes]:
    """Returns a certificate as Python decodes that of a peer, and its DER form.

    Any authority may have signed it, and it may have any PEM label that OpenSSL takes. Python
    decodes only the certificate of a handshake, so this is a handshake, in memory.
    """
    server, client = (_context(kind, cert_file, key_file) for kind in _KINDS)
    server.load_verify_locations(cert_file)
    server.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    server.verify_mode, client.verify_mode = ssl.CERT_REQUIRED, ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    accepted = server.wrap_bio(to_server, to_client, server_side=True)
    made = client.wrap_bio(to_client, to_server)
    for side in (made, accepted, made, accepted):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return accepted.getpeercert(), accepted.getpeercert(binary_form=True) or b""


def _refuse() -> str:
    raise OSError("the key is encrypted")
