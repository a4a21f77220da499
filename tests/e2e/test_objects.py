"""Memory is gone: a job goes on from an object store, bit for bit; with a key, from its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from reft.cli.main import main
from tests.e2e.test_storage import STEPS, check_equal, refused, undisturbed
from tests.support.daemons import DaemonProcess, Site, vanish
from tests.support.objects import ENVIRONMENT, ObjectServer, Refusal, RequestCheck, object_server
from tests.support.trainers import Spec, Trainers, run


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    with object_server() as server:
        yield server


def cli(*arguments: str) -> Any:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def persisted(site: Site, world: int, at: int, *flags: str) -> tuple[list[DaemonProcess], int]:
    """Trains up to a step, and persists; returns the daemons and the step on storage."""
    daemons = site.add(world, *flags)
    addresses = [each.address for each in daemons]
    job = Trainers(Spec(addresses[0], steps=STEPS, options={"seal_at": [at], "pause_at": [at]}), world, addresses)
    job.wait_for(at)
    done = cli("persist", "job", "--json", "--daemon", addresses[0])
    assert done.exit_code == 0, done.output
    job.kill()
    return daemons, json.loads(done.stdout)["step"]


def exported(folder: Path, what: str, step: int, *more: str) -> dict[str, bytes]:
    """Returns name → bytes of the files of an export."""
    done = cli("export", what, "--to", str(folder), "--step", str(step), *more)
    assert done.exit_code == 0, done.output
    return {each.name: each.read_bytes() for each in folder.iterdir()}


def test_all_memory_is_gone_and_the_job_goes_on(site: Site, server: ObjectServer, tmp_path: Path) -> None:
    """An export of the objects has the bytes that an export of the memory has."""
    url = f"s3://{server.new_bucket()}/runs/one"
    lost, step = persisted(site, 2, 5, "--persist", url)
    assert all(ENVIRONMENT["AWS_SECRET_ACCESS_KEY"] not in each.log.read_text() for each in lost)
    memory = exported(tmp_path / "memory", "job", step, "--daemon", lost[0].address)
    vanish(*lost)
    server.requests.clear()
    assert exported(tmp_path / "objects", f"{url}/job", step) == memory
    assert {request.method for request in server.requests} == {"GET", "HEAD"}
    refused = cli("export", f"{url}/other", "--to", str(tmp_path / "none"))
    assert refused.exit_code == 11 and not (tmp_path / "none").exists()
    daemons = site.add(2, "--persist", url)
    results = run(Spec(daemons[0].address, steps=STEPS), 2, [each.address for each in daemons])
    check_equal(results, undisturbed(2), step)
    assert f"GOES ON FROM STORAGE: step {step} (epoch 1)" in results[0]["said"]
    ((job),) = json.loads(cli("list", url, "--json").stdout)["jobs"]
    assert step in [row["step"] for row in job["held"]]
    assert cli("verify", url).exit_code == 0
    assert cli("verify", url, "other").exit_code == 11


def test_store_that_refuses_stops_attach_and_never_training(site: Site, server: ObjectServer) -> None:
    url = f"s3://{server.new_bucket()}"
    server.check = Refusal(403)
    (daemon,) = site.add(1, "--persist", url, "--persist-every", "500ms")
    said = refused(daemon)
    assert f"storage {url} can't be read" in said and "credentials" in said
    server.check = RequestCheck()
    job = Trainers(Spec(daemon.address, steps=STEPS, options={"pause_at": [3]}))
    job.wait_for(3)
    server.check = Refusal(503)
    job.let_go(3)
    assert job.wait() == [0]
    assert cli("list", url).exit_code == 1


def test_key_of_the_daemons_decides(site: Site, server: ObjectServer, tmp_path: Path) -> None:
    url, keys = f"s3://{server.new_bucket()}", []
    for number in range(2):
        keys.append(tmp_path / f"key-{number}")
        keys[-1].write_bytes(bytes([number + 65]) * 32)
        keys[-1].chmod(0o600)
    lost, step = persisted(site, 1, 5, "--persist", url, "--persist-key-file", str(keys[0]))
    vanish(*lost)
    (daemon,) = site.add(1, "--persist", url, "--persist-key-file", str(keys[1]))
    assert "MAC of another key" in refused(daemon)
    vanish(daemon)
    (daemon,) = site.add(1, "--persist", url, "--persist-key-file", str(keys[0]))
    (result,) = run(Spec(daemon.address, steps=STEPS))
    check_equal([result], undisturbed(1), step)
    for key, code in ((keys[0], 0), (keys[1], 1)):
        assert cli("verify", url, "--persist-key-file", str(key)).exit_code == code
        out = "--to", str(tmp_path / f"out-{code}"), "--persist-key-file", str(key)
        assert cli("export", f"{url}/job", *out).exit_code == code and (tmp_path / f"out-{code}").exists() == (not code)
    assert "A" * 32 not in daemon.log.read_text()


def test_address_with_credentials_is_refused_and_not_repeated() -> None:
    for arguments in (["list", "s3://key:secret@bucket/x"], ["verify", "s3://key:secret@bucket/x"]):
        done = cli(*arguments)
        assert done.exit_code == 2 and "secret" not in done.output
