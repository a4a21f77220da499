"""Command lines in the documentation do what is said of them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("README.md", "examples/**/*.py", "examples/**/*.md", "reft/**/*.py")
COMMAND = re.compile(r"\btorchrun( +(-[^\s`]+|[A-Z_]+=\S+|…))+")


def without_backend(text: str) -> list[str]:
    """Commands whose name or endpoint torchrun would replace or leave alone: without a backend it has others in mind."""
    commands = [found.group() for found in COMMAND.finditer(text)]
    return [each for each in commands if re.search("--rdzv-(id|endpoint)", each) and "--rdzv-backend" not in each]


def test_every_command_with_a_name_or_an_endpoint_names_the_backend():
    texts = {path: path.read_text() for place in PLACES for path in ROOT.glob(place)}
    assert {path: found for path, text in texts.items() if (found := without_backend(text))} == {}
    assert sum("--rdzv-id" in text for text in texts.values()) > 10, "it reads where such commands are"


def test_it_finds_what_it_looks_for():
    assert without_backend("so: `torchrun --nproc-per-node=8 --rdzv-id=run1 ... train.py`")
    assert without_backend("torchrun --nnodes=4 --rdzv-endpoint=storehost:29400 …")
    assert not without_backend("torchrun --nnodes=4 --rdzv-backend=c10d --rdzv-id=a train.py")
    assert not without_backend("torchrun --nproc-per-node=8 train.py; the job's name is --rdzv-id")
