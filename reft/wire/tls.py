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

import logging
import ssl
import threading
import weakref
from pathlib import Path
from typing import Final

import grpc

from reft.errors import ConfigError

log = logging.getLogger("reft")
REREAD_S: Final = 60.0


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

    def server(self) -> grpc.ServerCredentials:
        """Returns credentials for a server; each handshake uses the newest contents."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._configuration, require_client_authentication=True
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        key, cert, ca = self._files.content
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca)

    def client(self) -> grpc.ChannelCredentials:
        """Returns credentials for a channel, which keeps the contents of this moment."""
        key, cert, ca = self._files.content
        return grpc.ssl_channel_credentials(ca, key, cert)


class _CertificateFiles:
    """The three files, and their newest contents that fit together.

    Attributes:
        paths: of certificate, key and authorities.
        content: key, certificate and authorities.
        generation: how often the contents have changed.
        wake: set to read the files now.
    """

    def __init__(self, cert: Path, key: Path, ca: Path) -> None:
        self._cert, self._key, self._ca = self.paths = cert, key, ca
        self.content = self._read()
        self.generation = 0
        self.wake = threading.Event()
        self._is_ended = False

    def end(self) -> None:
        """Ends `watch`. Returns at once."""
        self._is_ended = True
        self.wake.set()

    def watch(self) -> None:
        """Rereads the files every REREAD_S and at each `wake`, until `end`."""
        logged = ""
        while True:
            self.wake.wait(REREAD_S)
            self.wake.clear()
            if self._is_ended:  # asked after `clear`, so that an `end` meanwhile wakes the next wait
                return
            try:
                content = self._read()
            except ConfigError as error:
                if str(error) != logged:
                    log.error("the certificates stay as they were: %s", error)
                logged = str(error)
                continue
            logged = ""
            if content != self.content:
                self.content = content
                self.generation += 1
                log.info("certificates from %s, %s and %s serve from now on", self._cert, self._key, self._ca)

    def _read(self) -> tuple[bytes, bytes, bytes]:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._cert, self._key, password=_refuse)
            context.load_verify_locations(self._ca)
            return self._key.read_bytes(), self._cert.read_bytes(), self._ca.read_bytes()
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(
                f"{self._cert}, {self._key} and {self._ca} can't be used for TLS: {error}.",
                "check --tls-cert, --tls-key and --tls-ca",
            ) from error


def _refuse() -> str:
    raise OSError("the key is encrypted")
