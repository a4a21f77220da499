"""Mutual TLS between nodes, with certificates that may be replaced while jobs run.

    files ─► a thread, every REREAD_S and when told to ─► what they held when they last fitted together
                                  connections that are accepted ◄──┤ asked with each handshake
                     connections that are made, if they must be ◄──┘ `generation` says whether it has changed

Connections that stand go on. Files that can't be read, or don't fit together, change nothing and are reported: a process that
replaces one file after the other is not caught in between. Nobody who calls or answers reads a file: one that lies on a
file system that hangs must not silence a node.
"""

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path
from typing import Final

import grpc

from reft.errors import ConfigError

log = logging.getLogger("reft")
REREAD_S: Final = 60.0


class Tls:
    """One side of mutual TLS: its certificate and key, and what signed those of all nodes.

    Args:
        cert: PEM file, of this node.
        key: PEM file, its key; not encrypted.
        ca: PEM file, one or more authorities.

    Attributes:
        generation: how often what the files hold has changed.

    Raises:
        ConfigError: a file can't be read, or they don't fit together.
    """

    def __init__(self, cert: Path, key: Path, ca: Path) -> None:
        self._cert, self._key, self._ca = cert, key, ca
        self._content = self._read()
        self.generation = 0
        self._wake = threading.Event()

    def watch(self) -> None:
        """Reads the files anew from now on, in a thread that ends with the process."""
        threading.Thread(target=self._watch, name="reft-tls", daemon=True).start()

    def reread(self) -> None:
        """Has the thread read the files now. Returns at once."""
        self._wake.set()

    def _watch(self) -> None:
        said = ""
        while True:
            self._wake.wait(REREAD_S)
            self._wake.clear()
            try:
                content = self._read()
            except ConfigError as error:
                if str(error) != said:
                    log.error("the certificates stay as they were: %s", error)
                said = str(error)
                continue
            said = ""
            if content != self._content:
                self._content = content
                self.generation += 1
                log.info("certificates from %s, %s and %s serve from now on", self._cert, self._key, self._ca)

    def _read(self) -> tuple[bytes, bytes, bytes]:
        try:
            fits = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            fits.load_cert_chain(self._cert, self._key, password=_refuse)
            fits.load_verify_locations(self._ca)
            return self._key.read_bytes(), self._cert.read_bytes(), self._ca.read_bytes()
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(
                f"{self._cert}, {self._key} and {self._ca} can't be used for TLS: {error}.",
                "check --tls-cert, --tls-key and --tls-ca",
            ) from error

    def server(self) -> grpc.ServerCredentials:
        """For a server: each handshake has what holds at the time."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._configuration, require_client_authentication=True
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        key, cert, ca = self._content
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca)

    def client(self) -> grpc.ChannelCredentials:
        """For a channel: it keeps what holds now."""
        key, cert, ca = self._content
        return grpc.ssl_channel_credentials(ca, key, cert)


def _refuse() -> str:
    raise OSError("the key is encrypted")
