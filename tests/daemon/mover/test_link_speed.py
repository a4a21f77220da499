"""The speed of the link that sends: that of a network card, and of nothing else."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from reft_daemon.mover.link_speed import interface_of, link_speed


def interface(folder: Path, speed: str | None, kind: str = "device") -> Path:
    """Makes what the kernel shows of an interface `eth0`."""
    (folder / "eth0" / kind).mkdir(parents=True)
    if speed is not None:
        (folder / "eth0/speed").write_text(speed)
    return folder


@pytest.mark.parametrize("kind", ["device", "bonding"])
def test_the_speed_of_a_card_or_a_bond_in_bytes(tmp_path, kind):
    assert link_speed("eth0", interface(tmp_path, "25000\n", kind)) == 25 * 10**9 // 8


@pytest.mark.parametrize("speed", ["-1\n", "0\n", "", None])
def test_a_card_without_a_link_has_no_known_speed(tmp_path, speed):
    assert link_speed("eth0", interface(tmp_path, speed)) is None


def test_the_speed_of_a_virtual_interface_is_not_believed(tmp_path):
    assert link_speed("eth0", interface(tmp_path, "10000\n", "veth")) is None


@pytest.mark.parametrize("name", ["", "eth1"])
def test_an_interface_that_is_not_there_has_no_known_speed(tmp_path, name):
    assert link_speed(name, interface(tmp_path, "25000\n")) is None


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == interface_of("localhost") == "lo"
    assert link_speed("lo") is None


def test_an_address_of_no_interface(monkeypatch):
    assert interface_of("203.0.113.9") == ""

    def fail(*_):
        raise OSError("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert interface_of("node7") == ""
