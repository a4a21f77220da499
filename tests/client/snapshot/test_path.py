"""The path of a snapshot from mark to sealed: DESIGN.md draws it, and a real snapshot takes it.

A profiler notes each call from one module of the path into another, in all threads of a session.
"""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest

from tests.client.attach.test_run import make
from tests.scenarios.test_state_kinds import step_once
from tests.support.daemons import until

DESIGN = Path(__file__).resolve().parents[3] / "reft/client/snapshot/DESIGN.md"
DRAWN = re.compile(r"^    \d+ +(\w+)\.\w+ ─► (\w+)\.(\w+)", re.MULTILINE)
HOPS_MAX, BACK_MAX = 20, 2
# Calls that ask or convert, and change nothing of the snapshot. `fence` and `close` end the window
# before, which is not open here; `request` is about the interval, `behind_writer` about streams.
QUESTIONS = set(
    "is_marked modules cadence_facts interval outcome_delays is_stale mismatched whole kept pins voids is_capturing times stamp "
    "__len__ chunk_bytes choose at __init__ to_plain storable finished layout layout_report compares_all fence close "
    "request extra_state_cost behind_writer".split()
)


class Hop(NamedTuple):
    """A call from one module into another one's function."""

    source: str
    target: str
    function: str


def drawn() -> list[Hop]:
    return [Hop(*groups) for groups in DRAWN.findall(DESIGN.read_text())]


def went_back(hops: list[Hop]) -> list[Hop]:
    """Returns the hops into a module that an earlier hop had entered."""
    entered = [hops[0].source] + [hop.target for hop in hops]
    return [hop for index, hop in enumerate(hops) if hop.target in entered[: index + 1]]


class Tracer:
    """Notes the hops between the modules of the path, while it is on."""

    def __init__(self, modules: set[str]) -> None:
        self.modules = modules
        self.is_on = False
        self.hops: list[Hop] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        target = self._module_of(frame)
        if not self.is_on or event != "call" or not target:
            return
        caller = frame.f_back
        while caller is not None and not self._module_of(caller):
            caller = caller.f_back
        name = frame.f_code.co_name
        # A thread's first call continues what another thread has handed over.
        if caller is not None and self._module_of(caller) != target and name not in QUESTIONS:
            self.hops.append(Hop(self._module_of(caller), target, name))

    def _module_of(self, frame: FrameType) -> str:
        module = frame.f_globals.get("__name__", "")
        name = module.rpartition(".")[2]
        return name if module.startswith("reft.client.") and name in self.modules else ""


@pytest.fixture
def tracer():
    tracer = Tracer({module for hop in drawn() for module in (hop.source, hop.target)})
    threading.setprofile(tracer)  # for threads that begin later
    yield tracer
    threading.setprofile(None)
    sys.setprofile(None)


def test_a_snapshot_takes_the_path_that_is_drawn(attach, tracer):
    model, optimizer = make()
    session = attach(model, optimizer)
    for _ in range(3):  # after these, plans and slots are made
        step_once(model, optimizer)
        session.step_end()
    assert session.seal(timeout=60)
    step_once(model, optimizer)
    history = session._window.snapshots.history
    sys.setprofile(tracer)
    tracer.is_on = True
    session.step_end()
    until(lambda: history.sealed_step == 4)
    tracer.is_on = False
    assert list(dict.fromkeys(tracer.hops)) == drawn()


def test_the_path_is_short_and_seldom_goes_back():
    hops = drawn()
    assert 10 <= len(hops) <= HOPS_MAX
    assert len(went_back(hops)) <= BACK_MAX, went_back(hops)


def test_a_hop_to_a_module_of_before_goes_back():
    hops = [Hop("a", "b", "f"), Hop("b", "c", "g"), Hop("a", "d", "h")]
    assert went_back(hops) == []
    assert went_back([*hops, Hop("d", "b", "i"), Hop("b", "a", "j")]) == [Hop("d", "b", "i"), Hop("b", "a", "j")]
