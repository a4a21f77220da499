"""Tests which connection makes room for a new one. A flood only pushes out its own connections."""

from __future__ import annotations

import pytest

from reft_daemon.child.admission import Admission, AdmissionLimits, counted_address


def admission(of_address: int = 3, unproved: int = 6, proved: int = 2) -> Admission:
    return Admission(AdmissionLimits(of_address, unproved, proved))


def test_the_oldest_unproved_connection_of_the_address_makes_room():
    doors = admission()
    assert [doors.add(f"f{i}", "flood") for i in range(5)] == ["", "", "", "f0", "f1"]
    assert doors.add("other", "other") == ""


def test_the_address_with_the_most_connections_makes_room_for_others():
    doors = admission(of_address=4)
    for i in range(4):
        assert doors.add(f"f{i}", "flood") == ""
    assert [doors.add(f"o{i}", f"other {i}") for i in range(4)] == ["", "", "f0", "f1"]


def test_a_proved_connection_is_never_pushed_out_by_its_address():
    doors = admission()
    doors.add("peer", "flood")
    assert doors.prove("peer")
    assert "peer" not in [doors.add(f"f{i}", "flood") for i in range(20)]
    assert not doors.prove("f0"), "it has ended"


def test_a_connection_that_ended_leaves_its_place():
    doors = admission()
    for i in range(3):
        doors.add(f"f{i}", "flood")
    doors.remove("f1")
    doors.remove("f1")  # as the end of a connection that was pushed out does
    assert [doors.add("f3", "flood"), doors.add("f4", "flood")] == ["", "f0"]


def test_proved_connections_are_bounded_too():
    doors = admission()
    for name in ("a", "b", "c"):
        doors.add(name, "peer")
    assert [doors.prove(name) for name in ("a", "b", "c")] == [True, True, False]
    doors.remove("a")
    assert doors.prove("c")


@pytest.mark.parametrize(
    ("host", "counted"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("fd00:1:2:3:aaaa::7", "fd00:1:2:3::/64"),
        ("fe80::7%eth0", "fe80::/64"),
    ],
)
def test_what_a_host_is_counted_by(host, counted):
    assert counted_address(host) == counted
