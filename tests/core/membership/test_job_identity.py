"""Tests names that may become folders, and which job a process belongs to."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reft.core.membership.job_identity import JOB_NAME, JobIdentity, check_name, identify
from reft.errors import ConfigError

BAD = [
    "../../etc", "a/b", ".", "..", "", "a" * 65, "a\0b", "a\nb", "a\n", "jоb", "１２", "-rf", ".hidden", "_x", " a", "a b",
    "a\\b", "a:b", "$HOME", "a*", "é", "a\u202eb",
]  # fmt: skip


def who(**changes: str) -> JobIdentity:
    facts = {"chosen": "", "run_id": "", "slurm_job": "", "script": "/data/train.py", "launch": "boot/1/2"}
    return identify(**{**facts, **changes}, user=1000)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_name_is_refused_and_shown(name):
    with pytest.raises(ConfigError) as refused:
        check_name(name)
    assert repr(name) in str(refused.value)


@pytest.mark.parametrize("name", ["a", "0", "A.b_c-9", "a" * 64, "a..b"])
def test_a_good_name_is_kept(name):
    assert check_name(name) == name


def test_an_unnamed_job_gets_the_name_of_its_rendezvous_and_stays_unnamed():
    assert who(unnamed="train-1") == JobIdentity("train-1", False)
    assert who(unnamed="train-1", run_id="run").named and who(unnamed="train-1", chosen="me") == JobIdentity("me", True)


@given(st.text(max_size=80))
def test_an_allowed_name_is_one_plain_path_component(name):
    try:
        check_name(name)
    except ConfigError:
        return
    assert name.isascii() and "/" not in name and name not in (".", "..") and 0 < len(name) <= 64


def test_the_order_of_the_sources_of_a_job_name():
    assert who(chosen="mine", run_id="42", slurm_job="7") == JobIdentity("mine", True)
    assert who(run_id="42", slurm_job="7") == JobIdentity("42", True)
    assert who(run_id="none", slurm_job="7") == JobIdentity("slurm-7", True)
    assert not who().named


@pytest.mark.parametrize("name", BAD[:4])
def test_a_chosen_bad_name_is_refused_and_not_corrected(name):
    if name:
        with pytest.raises(ConfigError):
            who(chosen=name)


def test_without_a_name_the_launch_identifies_the_job():
    first = who()
    assert first.id.startswith("train-") and first == who()
    assert who(launch="boot/1/3").id != first.id
    assert who(script="/other/train.py").id != first.id
    assert identify(chosen="", run_id="", slurm_job="", script="/data/train.py", user=1, launch="boot/1/2") != first


@given(st.text(min_size=1, max_size=120))
@example("_a b")
@example("-._ ")
def test_any_launchers_id_becomes_an_allowed_name(text):
    if text != "none":
        assert JOB_NAME.fullmatch(who(run_id=text).id)


@given(st.text(max_size=300))
def test_any_script_becomes_an_allowed_name(path):
    assert JOB_NAME.fullmatch(who(script=path).id)


@given(st.text(min_size=1, max_size=30), st.text(min_size=1, max_size=30))
def test_two_launcher_ids_never_get_the_same_name(one, other):
    if one != other and "none" not in (one, other):
        assert who(run_id=one).id != who(run_id=other).id
