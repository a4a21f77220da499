"""The committed protobuf stubs equal those that protoc makes of the .proto files."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def check(root: Path) -> tuple[int, str]:
    """Runs `.ci/stubs --check`; returns its exit code and output.

    The first run sets up an environment. If that fails, the output names the remedy.
    """
    done = subprocess.run([root / ".ci/stubs", "--check"], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(400)  # the first run downloads the generator
def test_the_stubs_are_fresh_and_a_changed_proto_is_found(tmp_path):
    code, text = check(ROOT)
    assert code == 0, text
    # One test, because the second part uses the environment that the first part has set up.
    for folder in (".ci", "proto", "reft/wire/v1"):
        if (ROOT / folder).exists():
            shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / ".venv-stubs").symlink_to(ROOT / ".venv-stubs")
    (tmp_path / "proto/reft/v1").mkdir(parents=True, exist_ok=True)
    (tmp_path / "proto/reft/v1/extra.proto").write_text('syntax = "proto3";\npackage reft.v1;\nmessage Extra {}\n')
    code, text = check(tmp_path)
    assert code == 1
    assert "make stubs" in text
