"""A host that has all addresses of a few networks of IPv6."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest

from tests.support.flooder import free_socket
from tests.support.forks import enter
from tests.support.limits import own_network

# Each has 64 bits, as the flooder's has.
DAEMON_NETWORK: Final = "fd00:0:0:1::"
PEER_NETWORK: Final = "fd00:0:0:2::"
ROUTE: Final = (
    f"ip link set lo up && ip -6 addr add {DAEMON_NETWORK}1/128 dev lo && ip -6 route add local fd00::/32 dev lo"
)


def has_ipv6() -> bool:
    """Whether sockets of this host can have an address of IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as tried:
            tried.bind(("::1", 0))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def network_of_ipv6() -> Iterator[Callable[[], socket.socket]]:
    """Yields what makes sockets of that host. Without IPv6 or namespaces the test is skipped."""
    with host_of_ipv6() as path, sockets_of(path) as new_socket:
        yield new_socket


@contextlib.contextmanager
def host_of_ipv6() -> Iterator[str]:
    """Yields the path of that host's network namespace, or skips the test."""
    if not has_ipv6():
        pytest.skip("this host has no IPv6")
    with own_network(ROUTE) as path:
        yield path


@contextlib.contextmanager
def sockets_of(path: str) -> Iterator[Callable[[], socket.socket]]:
    """Yields what makes sockets in a network namespace, where they stay."""
    with ThreadPoolExecutor(1, initializer=enter, initargs=(path,)) as inside:
        yield lambda: inside.submit(free_socket).result()
