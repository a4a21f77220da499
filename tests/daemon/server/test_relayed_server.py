"""Tests where a daemon listens: at all addresses of a host, at one port, alone."""

from __future__ import annotations

import errno
import socket

import pytest

from reft_daemon.server.relayed_server import listen_at, listen_at_path


def ports(listeners: list[socket.socket]) -> set[int]:
    return {listener.getsockname()[1] for listener in listeners}


def close(listeners: list[socket.socket]) -> None:
    for listener in listeners:
        listener.close()


def test_all_addresses_of_a_name_have_one_port():
    listeners = listen_at("localhost", 0)
    (port,) = ports(listeners)
    hosts = {info[4][0] for info in socket.getaddrinfo("localhost", 0)}
    for listener in listeners:
        assert listener.getsockname()[0] in hosts
        socket.create_connection(listener.getsockname()[:2], 5).close()
    assert port and len(listeners) == len(hosts)
    close(listeners)


def test_a_port_belongs_to_one_daemon_only():
    listeners = listen_at("127.0.0.1", 0)
    with pytest.raises(OSError, match="in use") as error:
        listen_at("127.0.0.1", *ports(listeners))
    assert error.value.errno == errno.EADDRINUSE
    close(listeners)


def test_a_port_can_be_taken_again_at_once():
    """Connections of the earlier daemon wait for their end for a minute."""
    listeners = listen_at("127.0.0.1", 0)
    address = listeners[0].getsockname()
    with socket.create_connection(address, 5):
        accepted, _ = listeners[0].accept()
        accepted.close()  # this side ends first, so this side's port waits
        close(listeners)
        close(listen_at(*address))


def test_an_address_of_another_host_is_refused():
    with pytest.raises(OSError, match="Cannot assign"):
        listen_at("192.0.2.7", 0)


def test_only_this_user_can_open_the_path(tmp_path):
    path = tmp_path / "d.sock"
    for _ in range(2):  # also where an earlier daemon has left its socket
        listener = listen_at_path(path)
        assert path.stat().st_mode & 0o777 == 0o600
        listener.close()
