"""Recomputes copies from real slots: the owners' bytes, or nothing, whatever a record is like."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from reft.core.commit.slots import SlotState
from reft.errors import FormatError, ReftError
from reft.failpoints import Failpoints, InjectedFault
from reft.replay import fold
from reft.replay.fold import CannotFold
from reft.replay.section_replay import CopiesDiffer, replay
from tests.support.parity import at
from tests.support.replays import ADAMW, ReplayScene, seal, section_digests, write_record

CONFIGS = {
    "adamw": ADAMW,
    "adam_l2": ("Adam", {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    "sgd": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(scene: ReplayScene) -> None:
    replay(scene.order, scene.base.map, scene.target.map, [each.map for each in scene.records], Failpoints())


@pytest.mark.parametrize("config", CONFIGS)
def test_copies_are_those_of_the_owners(config):
    scene = ReplayScene(*CONFIGS[config], owners=2, without_update=[12])
    scene.target.map.data[:] = 255  # earlier copies
    assert scene.made != scene.wanted != scene.base.map.data.tobytes()
    run(scene)
    header = scene.target.map.reread()
    assert (header.state, header.version, header.layout) == (SlotState.SEALED, at(15), scene.order.lane)
    assert scene.made == scene.wanted and scene.target.map.bad_chunks() == []


def test_one_section_of_several_may_be_made_at_another_place():
    """As a trainer does that replays the section of one rank."""
    scene = ReplayScene(owners=2)
    section = scene.order.sections.pop()
    del scene.order.sections[:]
    section.begin, scene.order.data_bytes = 0, section.nbytes
    scene.order.sections.append(section)
    run(scene)
    assert scene.target.map.header.data_bytes == section.nbytes
    assert scene.made[: section.nbytes] == scene.wanted[section.base_begin :][: section.nbytes]


@pytest.mark.parametrize("after", range(10))
def test_copies_without_one_of_the_updates_are_refused(after):
    scene = ReplayScene()
    failpoints, slots = Failpoints(f"replay.update:drop:after={after}:times=1"), [each.map for each in scene.records]
    with pytest.raises(CopiesDiffer, match=r"of rank 1 differs from the owner's in \d+ of \d+ chunks, first in chunk"):
        replay(scene.order, scene.base.map, scene.target.map, slots, failpoints)
    assert scene.target.map.reread().state is SlotState.WRITING


def test_no_update_gives_the_same_copies():
    scene = ReplayScene(marks=2, without_update=[11, 12])
    run(scene)
    assert scene.made == scene.wanted == scene.base.map.data.tobytes()


def test_zeros_follow_a_section_whose_chunk_is_whole():
    scene = ReplayScene(marks=1)
    section = scene.order.sections[0]
    assert section.nbytes % section.chunk_bytes
    wanted = scene.wanted[: section.nbytes]
    section.digests[:] = section_digests(wanted.ljust(len(section.digests) * section.chunk_bytes, b"\0"))
    with pytest.raises(CopiesDiffer):
        run(scene)
    section.has_whole_chunks = True
    run(scene)
    assert scene.made == scene.wanted


# Faults of records, at each position of a run of five steps


def drop(scene: ReplayScene, i: int) -> None:
    del scene.records[i]


def repeat(scene: ReplayScene, i: int) -> None:
    """The record of another mark lies in this mark's slot, too."""
    other = scene.records[i - 1].map
    again = scene.records[i].map
    again.begin(other.header.version, bytes(16), b"", other.header.data_bytes)
    again.data[:] = other.data
    again.put_capsule(other.capsule())
    seal(again)


def reorder(scene: ReplayScene, i: int) -> None:
    """Two records have changed places: the headers name one another's marks."""
    slots = [scene.records[i].map, scene.records[(i + 1) % 5].map]
    versions = [slot.header.version for slot in slots]
    kept = [(slot.header.data_bytes, slot.data.tobytes(), slot.capsule()) for slot in slots]
    for slot, version, (nbytes, data, capsule) in zip(slots, versions, kept[::-1], strict=True):
        slot.begin(version, bytes(16), b"", nbytes)
        slot.data[:] = bytearray(data)
        slot.put_capsule(capsule)
        seal(slot)


def rewrite(scene: ReplayScene, i: int) -> None:
    """A record was made again, without the digest of the record before."""
    version = scene.records[i].map.header.version
    write_record(scene.records[i].map, version, scene.owners, "0" * 16)


def flip_gradient(scene: ReplayScene, i: int) -> None:
    scene.records[i].map.data[4 * 5000 + 2] ^= 1


def flip_capsule(scene: ReplayScene, i: int) -> None:
    slot = scene.records[i].map
    slot._slot[slot.header.geometry.capsule_offset + 40] ^= 1


def tear(scene: ReplayScene, i: int) -> None:
    """Its writer has begun to write it again."""
    slot = scene.records[i].map
    slot.begin(at(99), bytes(16), b"", slot.header.data_bytes)


def land(scene: ReplayScene, i: int) -> None:
    slot = scene.records[i].map
    slot.begin(slot.header.version, bytes(16), b"", slot.header.data_bytes)
    slot.landed()


def other_epoch(scene: ReplayScene, i: int) -> None:
    mark = scene.records[i].map.header.version.step
    write_record(scene.records[i].map, at(mark, 2), scene.owners, "")


FAULTS: dict[str, Callable[[ReplayScene, int], None]] = {
    each.__name__: each
    for each in (drop, repeat, reorder, rewrite, flip_gradient, flip_capsule, tear, land, other_epoch)
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_record_never_gives_wrong_copies(fault):
    for i in range(5):
        scene = ReplayScene()
        FAULTS[fault](scene, i)
        with pytest.raises((CannotFold, CopiesDiffer, FormatError)) as refused:
            run(scene)
        assert scene.target.map.reread().state is not SlotState.SEALED
        if fault == "flip_gradient":
            assert f"the record of mark {11 + i} has changed in memory" in str(refused.value)


def test_a_chain_of_another_epoch_is_refused_by_name():
    scene, previous = ReplayScene(marks=2, without_update=[11, 12]), ""
    for slot in scene.records:
        previous = write_record(slot.map, at(slot.map.header.version.step, 2), [], previous)
    with pytest.raises(CannotFold, match="the record of mark 11 is of another epoch"):
        run(scene)


POINTS = ("begun", "copied", "updated", "updated:after=1", "updated:after=4", "folded", "landed", "sealed")


@pytest.mark.parametrize("point", POINTS)
def test_a_replay_that_ends_at_any_point_leaves_no_wrong_copies(point):
    """As a killed process leaves the slot; `tests/daemon/replay` kills real ones."""
    name, _, option = point.partition(":")
    scene = ReplayScene(marks=3)
    records = [each.map for each in scene.records]
    failpoints = Failpoints(":".join(filter(None, (f"replay.{name}:raise", option))))
    with pytest.raises(InjectedFault):
        replay(scene.order, scene.base.map, scene.target.map, records, failpoints)
    state = scene.target.map.reread().state
    if name in ("landed", "sealed"):
        assert state is SlotState[name.upper()] and scene.made == scene.wanted
    else:
        assert state is SlotState.WRITING and (scene.made == scene.wanted) is (name == "folded")
    run(scene)
    assert scene.target.map.reread().state is SlotState.SEALED and scene.made == scene.wanted


def test_records_may_come_in_any_order():
    scene = ReplayScene()
    scene.records.reverse()
    run(scene)
    assert scene.made == scene.wanted


def test_a_base_that_is_not_there_or_has_changed_gives_nothing():
    scene = ReplayScene(marks=1)
    scene.base.map.data[100] ^= 1
    with pytest.raises(CopiesDiffer, match="the copies that it began from have changed"):
        run(scene)
    scene.base.map.data[100] ^= 1
    run(scene)
    scene.base.map.begin(at(9), b"lane" * 4, b"", scene.nbytes)
    seal(scene.base.map)
    with pytest.raises(CannotFold, match="copies of step 10 are gone"):
        run(scene)


def test_one_bit_of_one_digest_refuses_the_copies():
    scene = ReplayScene(owners=2, marks=1)
    last = len(scene.order.sections[1].digests) - 1
    for section, chunk in ((0, 0), (0, 3), (1, last)):
        scene.order.sections[section].digests[chunk] ^= 1
        with pytest.raises(CopiesDiffer, match=f"rank {section + 1} differs from the owner's in 1 of"):
            run(scene)
        assert scene.target.map.reread().state is SlotState.WRITING
        scene.order.sections[section].digests[chunk] ^= 1
    run(scene)
    assert scene.made == scene.wanted


def test_an_optimizer_whose_step_differs_in_one_bit_is_refused(monkeypatch):
    class Drifting(torch.optim.AdamW):
        def step(self, *arguments):
            super().step(*arguments)
            for state in self.state.values():
                state["exp_avg"].view(torch.int32).flatten()[7] ^= 1

    scene = ReplayScene(marks=1)
    monkeypatch.setitem(fold.CLASSES, "AdamW", Drifting)
    with pytest.raises(CopiesDiffer, match="does not repeat the owner's optimizer bit for bit"):
        run(scene)
    assert scene.target.map.reread().state is SlotState.WRITING


def test_an_order_that_does_not_fit_its_slots_writes_nothing():
    for change in (
        lambda order: setattr(order, "data_bytes", order.data_bytes + 1),
        lambda order: setattr(order.sections[0], "begin", order.data_bytes),
        lambda order: order.sections[0].digests.pop(),
        lambda order: setattr(order.sections[0].leaves[0], "offset", order.sections[0].nbytes),
    ):
        scene = ReplayScene(marks=1)
        change(scene.order)
        with pytest.raises(ReftError):
            run(scene)
        assert scene.target.map.reread().state is SlotState.EMPTY


def test_state_that_is_inline_or_missing_is_named():
    scene = ReplayScene(marks=1)
    section = scene.order.sections[0]
    steps = [i for i, leaf in enumerate(section.inline_leaves) if leaf.name == "optimizer.0.step.matrix"]
    del section.inline_leaves[steps[0]], section.inline_bytes[steps[0]]
    with pytest.raises(CannotFold, match="torch refuses the update of matrix"):
        run(scene)
