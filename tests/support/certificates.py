"""Makes certificates for daemons in tests, with the script that clusters use."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.daemons import ROOT

SCRIPT = ROOT / "examples" / "deploy" / "certificates.sh"
USER, NODE = "alice", "test"
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def why_not() -> str:
    """Returns why certificates can't be made; empty if they can."""
    return "" if shutil.which("openssl") else "certificates need the openssl command"


def openssl(*arguments: object) -> None:
    """Runs a command of openssl."""
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@dataclass(frozen=True)
class Certificates:
    """Authorities in a folder, by name, and what they have signed."""

    folder: Path

    def flags(self, authority: str, node: str = "", user: str = USER) -> tuple[str, ...]:
        """Returns the TLS flags of a daemon whose certificate is signed by this authority.

        Args:
            authority: made if it is not there.
            node: name of the daemon's node; empty: that of `DaemonProcess`.
            user: whose daemon it is.
        """
        pairs = zip(("--tls-cert", "--tls-key", "--tls-ca"), self.files(authority, "nodes", node, user), strict=True)
        return tuple(part for flag, file in pairs for part in (flag, str(file)))

    def agent(self, authority: str, node: str = "", user: str = USER) -> tuple[Path, Path, Path]:
        """Returns certificate, key and authorities of an agent; arguments as in `flags`."""
        return self.files(authority, "agents", node, user)

    def variables(self, authority: str, node: str = "", user: str = USER) -> dict[str, str]:
        """Returns the environment that names an agent's certificate; arguments as in `flags`."""
        names = ("REFT_TLS_CERT", "REFT_TLS_KEY", "REFT_TLS_CA")
        return dict(zip(names, map(str, self.agent(authority, node, user)), strict=True))

    def host(self, authority: str) -> tuple[Path, Path, Path]:
        """Returns certificate, key and authorities of a server on loopback that is no daemon."""
        *_, ca = self.files(authority, "nodes", "", USER)
        cert, key = ca.with_name("host.pem"), ca.with_name("host.key")
        names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
        command = ["req", "-x509", *KEY, "-subj", "/CN=host", "-addext", names, "-addext", "basicConstraints=CA:FALSE"]
        signing = ["-CA", ca, "-CAkey", ca.with_suffix(".key"), "-days", "2", "-keyout", key, "-out", cert]
        openssl(*command, *signing)
        return cert, key, ca

    def replace(self, authority: str, by: str) -> None:
        """Overwrites the files of `authority` with those of `by`, as a renewal does."""
        for cert in list((self.folder / authority).glob("*/*/*.pem")):
            user, kind = cert.parts[-3:-1]
            whose = kind, cert.stem, user
            for mine, new in zip(self.files(authority, *whose), self.files(by, *whose), strict=True):
                shutil.copy(new, mine)

    def files(self, authority: str, kind: str, node: str = "", user: str = USER) -> tuple[Path, Path, Path]:
        """Returns certificate, key and authorities; `kind` is "nodes" or "agents"."""
        folder, node = self.folder / authority, node or NODE
        cert, key = (folder / user / kind / f"{node}.{ending}" for ending in ("pem", "key"))
        if not cert.exists():
            subprocess.run(["bash", SCRIPT, folder, user, node], check=True, capture_output=True)
        return cert, key, folder / "ca.pem"
