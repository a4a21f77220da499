"""Which ranks did not come to an exchange: by the store, and in the error of real ranks."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from reft.client.link.rank_group import RankGroup
from reft.client.link.roll_call import WORLD_MAX, absent_ranks
from reft.errors import AttachError
from tests.support.trainers import Spec, Trainers


def test_the_ranks_that_do_not_write_are_absent():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank: absent_ranks(store, 7, rank, 4, 1.5), (0, 2)))
    assert found == [[1, 3], [1, 3]]
    assert absent_ranks(store, 8, 0, 2, 0.2) == [1], "an earlier exchange says nothing"


def test_no_rank_is_named_if_the_store_stands_still_or_the_job_is_large():
    class Stuck:
        is_over = threading.Event()

        def set(self, key: str, value: str) -> None:
            self.is_over.wait()

    stuck = Stuck()
    assert absent_ranks(stuck, 1, 0, 2, 0.0) == []
    stuck.is_over.set()
    assert absent_ranks(dist.HashStore(), 1, 0, WORLD_MAX + 1, 0.0) == []


def test_no_rank_is_named_if_the_store_ends_with_its_rank(capfd):
    """The others may have come, and could not write any more. Nobody sees a traceback."""

    class Ending:
        def __init__(self) -> None:
            self.keys, self.looks = set[str](), 0

        def set(self, key: str, value: str) -> None:
            self.keys.add(key)

        def check(self, keys: list[str]) -> bool:
            self.looks += 1
            if self.looks > 3:
                raise dist.DistNetworkError("Connection reset by peer")
            return keys[0] in self.keys

    assert absent_ranks(Ending(), 1, 0, 3, 30.0) == []
    assert not capfd.readouterr().err


def meet(spec: dict[str, Any]) -> None:
    """Ranks 0 and 1 meet, and rank 2 stands still until they have given up."""
    store = f"tcp://127.0.0.1:{spec['port']}"
    dist.init_process_group("gloo", init_method=store, rank=spec["rank"], world_size=spec["world"])
    rank_group, gate = RankGroup(1.0), Path(spec["out"]).parent / "gate"
    error = ""
    if spec["rank"] == 2:
        gate.read_text()
    else:
        try:
            rank_group.gather_or_raise(dict)
        except AttachError as failure:
            error = str(failure)
    Path(spec["out"]).write_text(json.dumps({"error": error}))
    if spec["rank"] == 0:
        gate.write_text("")
    os._exit(0)


class Meeting(Trainers):
    target = staticmethod(meet)


def test_the_error_names_the_rank_that_stands_still(tmp_path):
    meeting = Meeting(Spec(""), 3)
    os.mkfifo(meeting.folder / "gate")
    assert meeting.wait() == [0, 0, 0], meeting.errors()
    errors = [each["error"] for each in meeting.results()]
    assert all(error.startswith("rank 2 of 3 did not come within 1 s: ") for error in errors[:2]), errors
