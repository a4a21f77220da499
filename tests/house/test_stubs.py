"""The committed protobuf stubs are those that the .proto files make."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def check(root: Path) -> tuple[int, str]:
    """Sets up its own environment the first time; what it prints when that fails says the remedy."""
    done = subprocess.run([root / ".ci/stubs", "--check"], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(400)  # the first run downloads the generator
def test_the_stubs_are_fresh_and_a_changed_proto_is_found(tmp_path):
    code, said = check(ROOT)
    assert code == 0, said
    # In one test: the second part borrows the environment that the first one has set up.
    for folder in (".ci", "proto", "reft/wire/v1"):
        if (ROOT / folder).exists():
            shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / ".venv-stubs").symlink_to(ROOT / ".venv-stubs")
    (tmp_path / "proto/reft/v1").mkdir(parents=True, exist_ok=True)
    (tmp_path / "proto/reft/v1/extra.proto").write_text('syntax = "proto3";\npackage reft.v1;\nmessage Extra {}\n')
    code, said = check(tmp_path)
    assert code == 1
    assert "make stubs" in said
