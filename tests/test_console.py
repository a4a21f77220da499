"""Tests of warnings on stderr, with and without configured logging."""

from __future__ import annotations

import errno
import io
import subprocess
import sys

import pytest

from reft.console import say

TWICE = "import logging, reft.console as console; console.name_warnings(); console.name_warnings(); "
WARNS = "logging.getLogger('reft').warning('rank %d skips snapshots', 0); logging.getLogger('reft').info('no')"


@pytest.mark.parametrize(
    ("configured", "line"),
    [
        ("", "[reft] rank 0 skips snapshots"),
        ("logging.basicConfig(format='%(name)s: %(message)s'); ", "reft: rank 0 skips snapshots"),
        ("logging.getLogger('reft').addHandler(logging.StreamHandler()); ", "rank 0 skips snapshots"),
    ],
    ids=["none", "the root's", "reft's"],
)
def test_a_warning_is_printed_once_with_the_name_of_reft(configured, line):
    done = subprocess.run([sys.executable, "-c", TWICE + configured + WARNS], capture_output=True, text=True)
    assert done.stderr.splitlines() == [line]


def test_each_line_of_a_message_has_the_name_of_reft(capfd):
    say("no daemon answers.\nFix: start reft-daemon")
    assert capfd.readouterr().err == "[reft] no daemon answers.\n[reft] Fix: start reft-daemon\n"


def test_names_from_elsewhere_give_no_orders_to_a_terminal(capfd):
    say("node \x1b[2Ja\r\x9b31m\u202e is silent")
    assert capfd.readouterr().err == "[reft] node \\x1b[2Ja\\r\\x9b31m\\u202e is silent\n"


class Full(io.StringIO):
    """Takes no line, as a file on a full disk."""

    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, "no space left")


def test_a_line_that_stderr_does_not_take_is_lost(monkeypatch):
    """Neither a full disk nor a closed file ends the agent or the trainer that says something."""
    closed = io.StringIO()
    closed.close()
    for stream in (Full(), closed):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            say("node a: lost.")
