"""The job key: HKDF by the vectors of RFC 5869, the key's file, and what follows from a key."""

from __future__ import annotations

import os

import pytest

from reft.errors import ConfigError
from reft.wire import job_key
from reft.wire.job_key import FILE_VARIABLE, VARIABLE, JobKey, hkdf_sha256

SECRET = "correct horse battery staple"

# RFC 5869, appendix A: test cases 1 to 3, with SHA-256. IKM, salt, info, length, OKM.
VECTORS = [
    (
        "0b" * 22, "000102030405060708090a0b0c", "f0f1f2f3f4f5f6f7f8f9", 42,
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
    ),
    (
        bytes(range(0x50)).hex(), bytes(range(0x60, 0xB0)).hex(), bytes(range(0xB0, 0x100)).hex(), 82,
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
        "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
    ),
    (
        "0b" * 22, "", "", 42,
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("key", "salt", "info", "nbytes", "derived"), VECTORS)
def test_hkdf_gives_the_bytes_of_the_rfc(key, salt, info, nbytes, derived):
    assert hkdf_sha256(*map(bytes.fromhex, (key, salt, info)), nbytes).hex() == derived


@pytest.mark.parametrize("nbytes", [0, 255 * 32 + 1])
def test_hkdf_refuses_other_lengths(nbytes):
    with pytest.raises(ValueError, match=str(nbytes)):
        hkdf_sha256(b"key", b"", b"", nbytes)


def test_secrets_differ_by_key_job_launch_and_use():
    one, other = JobKey(b"k" * 16), JobKey(b"l" * 16)
    secrets = [
        secret
        for key in (one, other)
        for secret in (
            key.launch_secret("job", "launch"), key.launch_secret("job", "launch2"), key.launch_secret("job2", "launch"),
            key.job_token("job"), key.job_token("job2"), key.entry_key("job"), key.entry_key("job2"),
        )
    ]  # fmt: skip
    assert len(set(secrets)) == len(secrets) and {len(secret) for secret in secrets} == {32}
    assert one.job_token("job") == JobKey(b"k" * 16).job_token("job"), "every node derives the same"


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return path


def test_a_key_comes_from_a_file_or_second_from_a_variable(key_file):
    assert job_key.load({}) is None
    by_file = job_key.load({FILE_VARIABLE: str(key_file), VARIABLE: "another key of the job"})
    assert by_file == job_key.load({VARIABLE: SECRET}) == JobKey(SECRET.encode())
    key_file.chmod(0o400)
    linked = key_file.with_name("link")  # as in a folder of mounted secrets
    linked.symlink_to(key_file)
    assert job_key.load({FILE_VARIABLE: str(linked)}) == by_file


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660])
def test_a_file_that_others_may_use_is_refused_by_name(key_file, mode):
    key_file.chmod(mode)
    with pytest.raises(ConfigError, match=f"{key_file}.*mode {mode:o}") as refused:
        job_key.load({FILE_VARIABLE: str(key_file)})
    assert f"chmod 600 {key_file}" in str(refused.value) and SECRET not in str(refused.value)


def test_a_file_of_another_user_is_refused_by_name(key_file, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(ConfigError, match=f"{key_file}.*belongs to user"):
        job_key.load({FILE_VARIABLE: str(key_file)})


def test_what_is_no_file_is_refused_by_name(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, why in (("pipe", "is no file"), ("none", "No such file"), (".", "is no file")):
        with pytest.raises(ConfigError, match=why):
            job_key.load({FILE_VARIABLE: str(tmp_path / name)})


@pytest.mark.parametrize("length", [1, 15, 4097])
def test_a_key_that_is_too_short_or_long_is_refused_by_name_and_not_shown(key_file, length):
    key_file.write_text("x" * length + "\n")
    for environment in ({FILE_VARIABLE: str(key_file)}, {VARIABLE: "x" * length}):
        with pytest.raises(ConfigError, match=f"{next(iter(environment))}.*{length} bytes") as refused:
            job_key.load(environment)
        assert "xx" not in str(refused.value)


def test_the_key_is_taken_out_of_the_environment_and_not_shown(key_file):
    environment = {
        FILE_VARIABLE: str(key_file),
        VARIABLE: "another key of the job",
        "HOME": "/",
        "REFT_ETCD_PASSWORD": "pw",
    }
    before = dict(environment)
    taken = job_key.take(environment)
    assert taken.key == JobKey(SECRET.encode()) and taken.etcd_password == "pw"
    assert environment == {"HOME": "/"} and {**environment, **taken.variables} == before
    assert not any(text in f"{taken!r} {taken}" for text in (SECRET, "another key", "pw"))
    assert job_key.take(environment) == job_key.AgentSecrets()


def test_a_refused_key_stays_in_the_environment():
    environment = {VARIABLE: "short"}
    with pytest.raises(ConfigError):
        job_key.take(environment)
    assert environment == {VARIABLE: "short"}
