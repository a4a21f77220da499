"""The commands that a README prints, and running one as it stands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
READMES = sorted(path for path in ROOT.glob("**/README.md") if not path.relative_to(ROOT).parts[0].startswith("."))
PROGRAMS = (
    *("pip", "python3?", "torchrun", "reft-cli", "reft-daemon", "make", "pytest", "bash", "sh", "sbatch", "srun"),
    *("kubectl", "systemctl", "docker", "git", "curl", "p?kill", "rm", "cd", "export", "certificates\\.sh"),
)
COMMAND = re.compile(rf"([A-Z_]+=\S+ +)*(\S*/)?({'|'.join(PROGRAMS)}) +\S")
NAMED = {"reft-daemon --spare", "reft-cli rehearse"}  # names in a sentence
PYTEST = re.compile(r"(\.venv/bin/)?pytest ")
BENCHMARK = re.compile(r"([A-Z_]+=\S+ +)*(\.venv/bin/)?python bench/(?!picture|record_demo)\w+\.py\b")


def parts(text: str) -> tuple[list[str], str, str]:
    """The code blocks' lines, the shell blocks as text, and all other text.

    Lines of shell blocks also count as lines of code blocks.
    """
    code, shell, prose = [], [], []
    fence = None
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            fence = line[3:].strip() if fence is None else None
        elif fence is not None:
            (shell if fence in ("bash", "sh", "console") else code).append(line)
        else:
            (code if line.startswith("    ") else prose).append(line)
    return code, "\n".join(shell), "\n".join(prose)


def commands_of(text: str) -> list[str]:
    """Returns all lines of shell blocks, and other code of a program with an argument."""
    code, shell, prose = parts(text)
    spans = re.findall(r"`([^`]+)`", prose)
    found = shell.splitlines() + [each for each in code + spans if COMMAND.match(each.strip())]
    return [command for each in found if (command := normal(each)) and command not in NAMED]


def normal(command: str) -> str:
    """Without a comment, with single spaces."""
    return " ".join(re.sub(r"(^|\s)#.*", "", command).split())


def printed() -> Iterator[tuple[str, str]]:
    """Each command of all READMEs, with the README's path."""
    for path in READMES:
        yield from ((command, path.relative_to(ROOT).as_posix()) for command in commands_of(path.read_text()))


def matching(pattern: re.Pattern[str]) -> list[str]:
    """Those commands of all READMEs that begin so."""
    return sorted({command for command, _ in printed() if pattern.match(command)})


class Reader:
    """A reader that types a README's commands, in a folder like the checkout.

    Args:
        folder: an empty one.
        words: what is typed in place of a word of the README: names of machines and ports, and
            folders of the system.
        environment: changes to the environment.
    """

    def __init__(self, folder: Path, words: dict[str, str] | None = None, **environment: str) -> None:
        self.folder, self.words = folder, words or {}
        shutil.copytree(ROOT / "bench", folder / "bench", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("reft", "daemon", "tests", "Makefile", "pyproject.toml", ".ci", ".venv"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "examples").mkdir()
        for path in (ROOT / "examples").iterdir():
            if path.suffix != ".svg":
                (folder / "examples" / path.name).symlink_to(path)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("REFT_", "SLURM_"))}
        path = os.pathsep.join([str(BIN), os.environ["PATH"]])
        self.environment = {
            **kept, "PATH": path, "REFT_RUNTIME_DIR": str(folder / "run"), "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "daemon")]), **environment,
        }  # fmt: skip

    def start(self, command: str, **changes: str) -> subprocess.Popen[str]:
        """Types the command."""
        for word, ours in self.words.items():
            command = command.replace(word, ours)
        return subprocess.Popen(
            ["bash", "-c", command], cwd=self.folder, env={**self.environment, **changes}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def run(self, command: str, code: int = 0, timeout: float = 110, **changes: str) -> str:
        """Runs the command to its end, and returns its output. Fails for another exit code."""
        with self.start(command, **changes) as process:
            try:
                output, _ = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        assert process.returncode == code, f"{command}: {process.returncode}\n{output}"
        return output
