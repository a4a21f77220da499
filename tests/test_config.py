"""Tests of the settings: precedence, limits, sizes, and facts from the launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.config import SIZE_MAX, Config, Launch, child_environment, parse_duration, parse_size, runtime_dir
from reft.errors import ConfigError


def test_an_argument_beats_the_environment_beats_the_default():
    surroundings = {"REFT_SLOTS": "4", "REFT_JOB": "from-env"}
    assert Config.load({}).slots == 0
    assert Config.load(surroundings).slots == 4
    loaded = Config.load(surroundings, slots=5, job=None)
    assert (loaded.slots, loaded.job) == (5, "from-env")


def test_every_field_is_a_variable():
    loaded = Config.load(
        {
            "REFT_MODE": "off", "REFT_JOB": "j", "REFT_DAEMON": "unix:/d", "REFT_RUNTIME_DIR": "/r", "REFT_SLOTS": "2",
            "REFT_CHUNK_BYTES": "8KiB", "REFT_ATTACH_DEADLINE_S": "1.5", "REFT_RPC_DEADLINE_S": "0.5",
            "REFT_SEAL_DEADLINE_S": "7", "REFT_FAILPOINTS": "a:kill", "REFT_PROTECT": "aec", "REFT_TOLERATE": "2",
            "REFT_PARITY_SCRATCH_BYTES": "8MiB", "REFT_LOAD_TRANSPORT": "nccl", "REFT_OVERHEAD_BUDGET": "0.01",
            "REFT_MTBF_S": "7200", "REFT_OVERRUN_SCRATCH_BYTES": "1MiB", "REFT_RESTORE": "require",
            "REFT_ALLOW_PICKLED_EXTRA_STATE": "1", "REFT_LINEAGE": "0123456789abcdef",
            "REFT_GENERATORS": "user", "REFT_REHEARSE": "/r/run",
        }
    )  # fmt: skip
    assert loaded == Config(
        "off", "j", "unix:/d", "/r", "aec", 2, 2, 8192, 8 << 20, "nccl", 1.5, 0.5, 7.0, 0.01, 7200.0, "a:kill", 1 << 20,
        "require", True, "0123456789abcdef", "user", "/r/run",
    )  # fmt: skip
    assert not Config.load({"REFT_ALLOW_PICKLED_EXTRA_STATE": "0"}).allow_pickled_extra_state


@pytest.mark.parametrize(
    "surroundings",
    [
        {"REFT_MODE": "on"}, {"REFT_SLOTS": "1"}, {"REFT_SLOTS": "17"}, {"REFT_SLOTS": "three"}, {"REFT_SLOTS": ""},
        {"REFT_CHUNK_BYTES": "4095"}, {"REFT_CHUNK_BYTES": "5000"}, {"REFT_CHUNK_BYTES": "0"},
        {"REFT_CHUNK_BYTES": "much"}, {"REFT_RPC_DEADLINE_S": "soon"}, {"REFT_LOAD_TRANSPORT": "mpi"},
        {"REFT_RESTORE": "yes"}, {"REFT_GENERATORS": "seed"},
        {"REFT_OVERHEAD_BUDGET": "1.0"}, {"REFT_OVERHEAD_BUDGET": "0.0"}, {"REFT_MTBF_S": "-1.0"}, {"REFT_MTBF_S": "nan"},
        {"REFT_MTBF_S": "inf"}, {"REFT_LINEAGE": "../etc"}, {"REFT_RUNTIME_DIR": "run"}, {"REFT_RUNTIME_DIR": "~/run"},
        {"REFT_ALLOW_PICKLED_EXTRA_STATE": "yes"},
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_and_shown(surroundings):
    with pytest.raises(ConfigError) as refused:
        Config.load(surroundings)
    (value,) = surroundings.values()
    assert value in str(refused.value)


def test_a_bad_argument_is_refused_too():
    with pytest.raises(ConfigError, match="slots is 99"):
        Config.load({}, slots=99)


@pytest.mark.parametrize("changes", [{"chunk_bytes": 1 << 32}, {"chunk_bytes": 4096.0}, {"slots": 2.0}])
def test_a_number_that_no_manifest_carries_is_refused(changes):
    ((name, value),) = changes.items()
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        Config.load({}, **changes)
    assert Config.load({}, chunk_bytes=1 << 31).chunk_bytes == 1 << 31


def test_config_reads_missing_arguments_from_the_environment(monkeypatch, tmp_path):
    """`attach(config=Config(…))` in a torchrun worker: the agent sets the daemon's address."""
    surroundings = {"REFT_DAEMON": "unix:/d", "REFT_SLOTS": "4", "REFT_MTBF_S": "60", "REFT_RUNTIME_DIR": str(tmp_path)}
    for name, value in surroundings.items():
        monkeypatch.setenv(name, value)
    made = Config(mtbf_s=7200.0, slots=3)
    assert (made.daemon, made.runtime_dir, made.mtbf_s, made.slots) == ("unix:/d", str(tmp_path), 7200.0, 3)
    monkeypatch.delenv("REFT_RUNTIME_DIR")
    assert Config().runtime_dir == str(runtime_dir())


def test_other_variables_are_left_alone():
    assert Config.load({"REFT_NODE": "n", "SLOTS": "9", "reft_slots": "9"}).slots == 0


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096), ("0", 0), ("1k", 1024), ("1K", 1024), ("64MiB", 64 << 20), ("1.5G", 3 << 29), (" 2 TiB ", 2 << 40),
        ("3MB", 3 << 20), ("7b", 7),
    ],
)  # fmt: skip
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "G", "-1", "1e3", "1 2", "0x10", "1PiB", "nan", "1,5G", "1..5G", "12 apples"])
def test_an_invalid_size_is_refused(text):
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


def test_no_size_is_more_than_a_message_can_carry():
    assert parse_size(f"{SIZE_MAX >> 40}T") == SIZE_MAX
    for text in (f"{SIZE_MAX + 1}", "99999999999T"):
        with pytest.raises(ConfigError, match="is too large"):
            parse_size(text)


@given(st.integers(0, 1 << 20), st.sampled_from(["", "k", "M", "Gi", "TiB"]))
def test_whole_sizes_are_exact(number, unit):
    factor = 1024 ** " kmgt".index((unit or " ")[0].lower())
    assert parse_size(f"{number}{unit}") == number * factor


def test_the_runtime_folder_does_not_depend_on_the_environment(tmp_path, monkeypatch):
    """With another login, TMPDIR or HOME a restarted trainer must find the same daemon."""
    for name in ("XDG_RUNTIME_DIR", "TMPDIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    assert runtime_dir() == Path(f"/tmp/reft-{os.getuid()}")
    assert Config.load().runtime_dir == str(runtime_dir())
    assert Config.load({"REFT_RUNTIME_DIR": str(tmp_path)}).runtime_dir == str(tmp_path)


def test_launch_reads_the_launchers_variables():
    assert Launch.load({}) == Launch(0, 1, "", "")
    launch = Launch.load({"RANK": "3", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "r", "SLURM_JOB_ID": "9"})
    assert launch == Launch(3, 8, "r", "9")
    assert launch.under_agent and not Launch.load({}).under_agent


def test_child_environment_adds_changes(monkeypatch):
    monkeypatch.setenv("REFT_SLOTS", "6")
    assert Config.load().slots == 6
    child = child_environment(REFT_SLOTS="7")
    assert child["REFT_SLOTS"] == "7" and os.environ["REFT_SLOTS"] == "6" and "PATH" in child


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("1s", 1), ("90 s", 90), ("30m", 1800), ("24h", 86_400), ("1.5H", 5400), ("0", 0)],
)
def test_durations_have_a_unit(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "-1s", "1y", "s", "1s2", "nan", "99999d", "1 day"])
def test_other_texts_are_no_durations(text):
    with pytest.raises(ConfigError, match=r"duration|longer"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RUNTIME_DIR", "run"), ("MODE", "on"), ("RESTORE", "old"), ("GENERATORS", "none"), ("LOAD_TRANSPORT", "mpi"),
        ("SLOTS", "1"), ("ATTACH_DEADLINE_S", "0"), ("RPC_DEADLINE_S", "-1"), ("SEAL_DEADLINE_S", "1e9"),
        ("OVERHEAD_BUDGET", "1"), ("MTBF_S", "-1"), ("CHUNK_BYTES", "5000"), ("PARITY_SCRATCH_BYTES", "4k"),
    ],
)  # fmt: skip
def test_the_remedy_of_each_setting_is_accepted(name, value):
    with pytest.raises(ConfigError) as refused:
        Config.load({f"REFT_{name}": value})
    variable, _, remedy = refused.value.hint.rpartition(" ")[2].partition("=")
    assert variable == f"REFT_{name}"
    Config.load({variable: remedy})


@pytest.mark.parametrize(("wanted", "is_set"), [("", "NONE"), ("info", "info")])
def test_a_daemon_silences_grpc_before_it_is_imported(wanted, is_set):
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    script = "import reft_daemon, os, sys; print(os.environ['GRPC_VERBOSITY'], 'grpc' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment | ({"GRPC_VERBOSITY": wanted} if wanted else {}),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [is_set, "False"]
