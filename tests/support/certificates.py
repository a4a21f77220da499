"""Makes certificates for daemons in tests, with openssl."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.netns import FIRST_NODE, LOOPBACK, NETWORK

NODES_MAX = 10
NAMES = ["DNS:localhost", "IP:127.0.0.1"] + [
    f"IP:{network}{FIRST_NODE + number}" for network in (NETWORK, LOOPBACK) for number in range(1, NODES_MAX)
]
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
# Python 3.13 requires this key usage, and the identifiers below.
AUTHORITY = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
NODE = f"subjectAltName={','.join(NAMES)}\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"


def why_not() -> str:
    """Returns why certificates can't be made; empty if they can."""
    return "" if shutil.which("openssl") else "certificates need the openssl command"


@dataclass(frozen=True)
class Certificates:
    """Authorities in a folder, by name. One certificate of each serves all nodes of a test."""

    folder: Path

    def flags(self, authority: str) -> tuple[str, ...]:
        """Returns the TLS flags of a daemon whose certificate is signed by this authority."""
        if not (self.folder / f"{authority}.pem").exists():
            self._make(authority)
        files = (f"{authority}-node.pem", f"{authority}-node.key", f"{authority}.pem")
        pairs = zip(("--tls-cert", "--tls-key", "--tls-ca"), files, strict=True)
        return tuple(part for flag, file in pairs for part in (flag, str(self.folder / file)))

    def replace(self, authority: str, by: str) -> None:
        """Overwrites the files of `authority` with those of `by`, as a renewal does."""
        for mine, new in zip(self.flags(authority)[1::2], self.flags(by)[1::2], strict=True):
            shutil.copy(new, mine)

    def _make(self, ca: str) -> None:
        files = ("-keyout", f"{ca}.key", "-out", f"{ca}.pem")
        self._openssl("req", "-x509", *KEY, *AUTHORITY, *files, "-days", "2", "-subj", f"/CN={ca}")
        (self.folder / "node").write_text(NODE)
        self._openssl("req", *KEY, "-keyout", f"{ca}-node.key", "-out", f"{ca}-node.csr", "-subj", "/CN=node")
        signing = ("-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial", "-extfile", "node")
        self._openssl("x509", "-req", "-in", f"{ca}-node.csr", *signing, "-days", "2", "-out", f"{ca}-node.pem")

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)
