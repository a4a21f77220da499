"""Tests --bulk and --protect-bandwidth: where and how fast a mover sends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from reft.core.coding.turn_pace import NO_LIMIT, BandwidthLimit, automatic_limit, fixed_limit
from reft.errors import ConfigError
from reft_daemon import main
from reft_daemon.mover.mover import MoverSettings
from reft_daemon.server import settings
from reft_daemon.server.settings import mover_settings


def parsed(**changes: object) -> MoverSettings:
    facts = {"bulk": "", "protect_bandwidth": "off", "host": "node7", "tls": None, "insecure": False}
    return mover_settings(SimpleNamespace(**{**facts, **changes}))


def test_without_bulk_the_mover_listens_where_the_daemon_does():
    assert parsed() == MoverSettings("node7", 0, NO_LIMIT, None, "")
    assert parsed(host="") == MoverSettings("127.0.0.1", 0, NO_LIMIT, None, "")


@pytest.mark.parametrize(
    ("bulk", "host", "port"),
    [
        ("127.0.0.2", "127.0.0.2", 0),
        ("127.0.0.2:29701", "127.0.0.2", 29701),
        ("[::1]", "::1", 0),
        ("[::1]:5", "::1", 5),
        ("localhost:0", "localhost", 0),
    ],
)
def test_bulk_names_another_address(bulk, host, port):
    assert parsed(bulk=bulk) == MoverSettings(host, port, NO_LIMIT, None, host)


@pytest.mark.parametrize("bulk", [":5", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "::1", "fd00::7:29701"])
def test_a_wrong_bulk_is_refused(bulk):
    with pytest.raises(ConfigError, match="neither HOST nor HOST:PORT"):
        parsed(bulk=bulk)


@pytest.mark.parametrize("bulk", ["0.0.0.0", "*:5", "[::]:5"])
def test_an_address_that_other_nodes_can_not_call_is_refused(bulk):
    with pytest.raises(ConfigError, match="names no address"):
        parsed(bulk=bulk, insecure=True)


def test_plain_text_beyond_loopback_is_refused():
    with pytest.raises(ConfigError, match="there is no TLS"):
        parsed(bulk="10.1.0.7")
    assert parsed(bulk="10.1.0.7", insecure=True).host == "10.1.0.7"


def test_the_rate_is_bytes_per_second():
    limit = fixed_limit(200 << 20)
    assert parsed(protect_bandwidth="200M/s").limit == parsed(protect_bandwidth="200M").limit == limit


def test_auto_asks_for_the_link_of_the_address_that_the_mover_has(monkeypatch):
    seen = []
    monkeypatch.setattr(settings, "interface_of", lambda host: seen.append(host) or f"card-of-{host}")
    monkeypatch.setattr(settings, "link_speed", lambda interface: 1000)
    limit = parsed(protect_bandwidth="auto", bulk="127.0.0.2:5").limit
    assert seen == ["127.0.0.2"] and limit == automatic_limit("card-of-127.0.0.2", 1000)
    assert parsed(protect_bandwidth="auto").limit == automatic_limit("card-of-node7", 1000)


def test_auto_does_not_know_the_speed_of_loopback():
    limit = parsed(protect_bandwidth="auto", host="127.0.0.1").limit
    assert limit == automatic_limit("lo", None) == BandwidthLimit(0, 30, "the speed of lo is unknown")


def test_the_flags_default_is_auto():
    [option] = [each for each in main.main.params if each.name == "protect_bandwidth"]
    assert option.default == "auto"


@pytest.mark.parametrize("rate", ["0", "1023k", "fast", "-5M", ""])
def test_a_wrong_rate_is_refused(rate):
    with pytest.raises(ConfigError):
        parsed(protect_bandwidth=rate)
