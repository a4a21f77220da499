"""A slip in an option of a benchmark ends it at once, before it measures something else, or nothing."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from bench.options import count, listed
from tests.support.daemons import ROOT


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", "", "²"])
def test_what_is_no_count(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no number from 1 on"):
        count(text)


def test_words_of_a_list():
    assert count("12") == 12 and listed(("a", "b"))("b,a") == "b,a"
    for text in ("c", "a,", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="is none of a, b"):
            listed(("a", "b"))(text)


@pytest.mark.parametrize(
    "command",
    ["save --ways plan", "overhead --ways raft", "recovery --backends torch", "load --cases none-such"],
)
def test_a_slip_ends_a_benchmark_at_once(command):
    name, *arguments = command.split()
    done = subprocess.run([sys.executable, ROOT / "bench" / f"{name}.py", *arguments], capture_output=True, text=True,
                          timeout=60, check=False)  # fmt: skip
    assert done.returncode == 2 and f"argument {arguments[0]}" in done.stderr
