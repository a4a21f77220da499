"""Ctrl-C ends a program quietly, also while the program imports its modules."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reft.interrupts import ended_by_interrupts

# Raises SIGINT once a program imports grpc, and then starts the program as pip's script does.
CODE = """
import importlib, importlib.abc, signal, sys

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "grpc":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
module, _, function = sys.argv.pop(1).partition(":")
getattr(importlib.import_module(module), function)()
"""
# pip's scripts, as pyproject.toml names them
SCRIPTS = [
    line.split('"')[1]
    for line in (Path(__file__).parents[1] / "pyproject.toml").read_text().splitlines()
    if line.startswith(("reft-cli = ", "reft-daemon = "))
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_interrupt_during_imports_shows_no_traceback(script):
    command = [sys.executable, "-c", CODE, script, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_both_programs_are_tried():
    assert len(SCRIPTS) == 2


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_an_interrupt_has_its_earlier_handler_after_the_block(handler):
    earlier = signal.signal(signal.SIGINT, handler)
    try:
        with ended_by_interrupts():
            within = signal.getsignal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, earlier)
    assert within is (handler if handler is signal.SIG_IGN else signal.SIG_DFL)
