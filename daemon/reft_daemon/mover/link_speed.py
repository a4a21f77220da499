"""Finds the speed of the network link that sends from an address."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

import psutil

INTERFACES: Final = Path("/sys/class/net")
BITS: Final = 8


def interface_of(host: str) -> str:
    """Returns the interface that has a host's address; empty if none has it."""
    try:
        wanted = {str(each[4][0]).partition("%")[0] for each in socket.getaddrinfo(host, None)}
    except OSError:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        if wanted & {address.address.partition("%")[0] for address in addresses}:
            return name
    return ""


def link_speed(interface: str, folder: Path = INTERFACES) -> int | None:
    """Returns bytes per second of an interface's link; None if they are unknown.

    Only a network card, or a bond of several, knows. Pairs of virtual interfaces (veth), which
    containers have, tell a speed that says nothing about the card behind them.

    Args:
        interface: its name; empty: unknown.
        folder: where the kernel describes interfaces.
    """
    place = folder / interface
    if not interface or not any((place / kind).exists() for kind in ("device", "bonding")):
        return None
    try:
        megabits = int((place / "speed").read_text())
    except (OSError, ValueError):  # the link is down
        return None
    return megabits * 10**6 // BITS if megabits > 0 else None
