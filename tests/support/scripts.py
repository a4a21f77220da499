"""Runs training scripts in processes forked from one that has imported torch.

The effect is that of `subprocess.run([sys.executable, path])`.
"""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path

from tests.support.trainers import FORKS


def become(path: str, environment: Mapping[str, str], folder: str) -> None:
    """Runs the script and its atexit functions in the fork, then ends.

    No clean-up of the tests runs.
    """
    for number, name in ((1, "out"), (2, "err")):
        output = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(output, number)
        os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [path]
    code = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    try:
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def execute(path: Path, environment: Mapping[str, str], timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
    """Runs a script to its end; returns its exit code and output.

    Args:
        path: the script.
        environment: the whole environment.
        timeout_s: after this time the script is killed.
    """
    with tempfile.TemporaryDirectory(prefix="reft-test-") as folder:
        process = FORKS.Process(target=become, args=(str(path), dict(environment), folder))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
        out, err = ((Path(folder) / name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess([str(path)], process.exitcode, out, err)
