"""What `reft-cli export` says when storage is silent, ends, or is named wrongly."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from reft.cli.export import stored_source
from reft.cli.export.stored_source import StoredFileProcess, StoredSource
from reft.cli.main import main
from reft.cli.storage import StorageUnreadable
from reft.errors import ReftError


def started(*command: str) -> StoredFileProcess:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return StoredFileProcess(process, "/shared/reft")


def test_storage_that_hangs_is_given_up_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_source, "ANSWER_S", 0.01)
    files = started("sleep", "60")
    with pytest.raises(StorageUnreadable, match=r"(?s)/shared/reft gave no byte for 0 s.*mounted"):
        files.checkpoint()
    with pytest.raises(StorageUnreadable, match="gave no byte"):
        files.read(0, 0, np.empty(8, np.uint8))
    files.close()


def test_program_that_ends_is_an_error() -> None:
    files = started("true")
    with pytest.raises(StorageUnreadable, match="the program that reads /shared/reft has ended"):
        files.read(0, 0, np.empty(8, np.uint8))
    files.close()


def test_bytes_are_read_in_the_order_in_which_they_were_asked() -> None:
    files = started("cat")
    files.ask(0, 0, 8)
    with pytest.raises(AssertionError, match="was asked for"):
        files.read(1, 0, np.empty(8, np.uint8))
    files.close()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("s3://bucket", "give s3://BUCKET/PREFIX/JOB"),
        ("s3://key:secret@bucket/x/job", "credentials"),
        ("ftp://bucket/job", "it knows s3://"),
    ],
)
def test_address_without_a_job_or_with_a_secret_is_refused(what: str, words: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["export", what, "--to", str(tmp_path / "out")], catch_exceptions=False)
    assert done.exit_code == 2 and words in done.stderr and "secret" not in done.output


def lineage(ident: str, *steps: int, ended: bool = False, **damaged: str) -> dict[str, Any]:
    """Returns a lineage as the program that reads storage says it."""
    rows = [{"name": f"e1-00000000-s{step}", "step": step, "counts": True} for step in steps]
    return {"lineage": ident, "ended": ended, "checkpoints": rows, "damaged": damaged, "trouble": ""}


@pytest.mark.parametrize(
    ("lineages", "step", "found"),
    [
        ([lineage("a", 5), lineage("b")], -1, "e1-00000000-s5"),
        ([lineage("a", 5), lineage("b", 7)], -1, "several lineages: a, b"),
        ([lineage("a"), lineage("b", 7, ended=True)], -1, "no checkpoint that counts; it has none."),
        ([lineage("a", e1="torn")], -1, "it has none and 1 damaged checkpoint."),
        ([lineage("a", 5, 4)], 3, "no checkpoint of step 3; it has the steps 5, 4."),
    ],
)
def test_lineage_and_checkpoint_are_those_that_an_attach_takes(
    monkeypatch: pytest.MonkeyPatch, lineages: list[dict[str, Any]], step: int, found: str
) -> None:
    listed = {"jobs": [{"job": "job", "lineages": lineages}]}
    monkeypatch.setattr(stored_source.storage, "audit", lambda *_, **__: iter([listed]))
    source = StoredSource("/shared", "job", step)
    if found.startswith("e1"):
        assert source._checkpoint()[1] == found
        return
    with pytest.raises(ReftError) as refused:
        source._checkpoint()
    assert found in refused.value.message and ("--step" in refused.value.hint) == (step >= 0)
