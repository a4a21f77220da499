"""Decides which connections of a door stay when places become short. Pure.

    a new connection ─► unproved: at most so many of one address, and of all addresses
                         │ a proved call (Admission.prove)
                         └► proved: counts no more against its address

A new connection always gets a place among the unproved ones. It takes the place of the oldest
connection of the same address, or of the address with the most. So a flood only pushes out itself.
A caller of the same address as a flood has as long to prove itself as the flood needs to fill the
places of the address. No address is banned, and an ended connection leaves no trace here.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True)
class AdmissionLimits:
    """How many connections a door has at most.

    Attributes:
        of_address: unproved ones of one address.
        unproved: of all addresses.
        proved: of all addresses; more than these stay among the unproved ones.
    """

    of_address: int
    unproved: int
    proved: int


class Admission:
    """The connections of one door, by name. The first one of an address is the oldest."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._unproved: dict[str, dict[str, None]] = {}  # address → names
        self._address_of: dict[str, str] = {}  # unproved name → address
        self._proved: set[str] = set()

    def add(self, name: str, address: str) -> str:
        """Adds a connection; returns the name of one that must end for it, or ""."""
        names = self._unproved.setdefault(address, {})
        displaced = ""
        if len(names) >= self._limits.of_address:
            displaced = next(iter(names))
        elif len(self._address_of) >= self._limits.unproved:
            most = max(self._unproved, key=lambda address: len(self._unproved[address]))
            displaced = next(iter(self._unproved[most]))
        names[name] = None
        self._address_of[name] = address
        if displaced:
            self.remove(displaced)
        return displaced

    def prove(self, name: str) -> bool:
        """Moves a connection to the proved ones; returns whether there is a place."""
        if name not in self._address_of or len(self._proved) >= self._limits.proved:
            return False
        self.remove(name)
        self._proved.add(name)
        return True

    def remove(self, name: str) -> None:
        """Forgets a connection; does nothing for an unknown one."""
        self._proved.discard(name)
        address = self._address_of.pop(name, None)
        if address is not None:
            del self._unproved[address][name]
            if not self._unproved[address]:
                del self._unproved[address]


def counted_address(host: str) -> str:
    """Returns what a host's connections are counted by.

    One machine may have a whole network of IPv6 addresses, so these count by their first 64 bits.
    """
    try:
        number = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if number.ipv4_mapped:
        return str(number.ipv4_mapped)
    return str(ipaddress.IPv6Network((number, 64), strict=False))
