"""A wrong option of a benchmark ends it before it measures anything."""

from __future__ import annotations

import argparse
import importlib
import sys

import pytest

from bench.options import count, listed, output


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", "", "²"])
def test_a_wrong_count_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no number from 1 on"):
        count(text)


def test_a_list_takes_only_its_words():
    assert count("12") == 12 and listed(("a", "b"))("b,a") == "b,a"
    for text in ("c", "a,", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="is none of a, b"):
            listed(("a", "b"))(text)


def test_an_output_file_that_cannot_be_written_is_refused(tmp_path):
    assert output(str(tmp_path / "new.json")) == tmp_path / "new.json"
    for path in (tmp_path, tmp_path / "none" / "new.json"):
        with pytest.raises(argparse.ArgumentTypeError, match="can't be written"):
            output(str(path))


@pytest.mark.parametrize(
    "command",
    ["save --ways plan", "overhead --ways raft", "recovery --backends torch", "load --cases none-such",
     "restore --sizes 3GB", "restore --cases 3-ranks", "restore --rounds 0",
     "exchange_turn --parts copies", "exchange_turn --rounds 0", "aor --rounds 0", "persist --rounds 0",
     "persist_restore --size 6GB",
     "encode --json /", "gpu_stage --json /none/x", "gpu_session --rounds 0",
     "overhead --trace /none/x", "recovery --trace /none/x"],
)  # fmt: skip
def test_a_wrong_option_ends_a_benchmark_at_once(command, monkeypatch, capsys):
    name, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"bench.{name}").main()
    assert ended.value.code == 2 and f"argument {arguments[0]}" in capsys.readouterr().err
