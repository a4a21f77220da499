"""Rebuilds a lost slot whose state exists once, among real daemons, from parity or a copy."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from reft.cli.main import main
from reft.client.snapshot.save_plan import ParityTiling, plan_save
from reft.client.state.tensors import leaf_of
from reft.wire import capsule_format
from reft.wire.slot_format import SlotMap, chunk_digest
from tests.daemon.rebuild.test_rebuild import Lost, contents, mapped, rebuilt_slot, recover
from tests.support.daemons import until
from tests.support.exchange import SHARED, SIZES, SLOTS, ShardedJob
from tests.support.shards import slot_data


class SlotsJob(ShardedJob):
    """A job whose slots hold what a trainer writes: shards of a replicated leaf, and own leaves."""

    def write(self, rank: int, step: int) -> SlotMap:
        chance = torch.Generator().manual_seed(step)
        tensors = {"shared": torch.randint(0, 256, (SHARED,), generator=chance, dtype=torch.uint8)}
        tensors[f"own{rank}"] = torch.randint(
            0, 256, (self.sizes[rank],), generator=chance.manual_seed(100 * step + rank), dtype=torch.uint8
        )
        leaves = [leaf_of(name, tensor, False) for name, tensor in tensors.items()]
        plan = plan_save(self.placement, rank, leaves, {}, ParityTiling())
        slot = self.maps_of[rank][step % SLOTS]
        slot.begin(self.version(step), plan.digest, plan.table, plan.data_bytes)
        slot.data[: plan.data_bytes] = slot_data(self.placement, rank, tensors)
        slot.put_capsule(capsule_format.encode({"compared": {}, "rank": rank, "riders": {}, "absent": []}))
        slot.landed()
        slot.sealed(np.array([chunk_digest(slot.chunk(i)) for i in range(slot.chunks)], np.uint64))
        return slot


@pytest.mark.parametrize(("lost", "protect"), [(0, "auto"), (1, "auto"), (2, "auto"), (0, "aor")])
def test_a_lost_node_comes_back_byte_for_byte_at_the_protected_step(start, trainer, lost, protect):
    daemons = [start("--listen", "127.0.0.1:0", "--node", f"n{i}") for i in range(3)]
    job = SlotsJob(daemons, SIZES, trainer, protect=protect).begin()
    job.seal(1)
    job.await_protected(1)
    asked, names = daemons[(lost + 1) % 3], [f"n{i}" for i in range(3)]
    question = ["status", "--job", "job", "--daemon", asked.address, "--what-if"]
    assert [CliRunner().invoke(main, [*question, f"lose={name}"]).exit_code for name in names] == [0, 0, 0]
    assert CliRunner().invoke(main, [*question, "lose=n0,n1"]).exit_code == 4
    before = contents(next((daemons[lost].folder / "job").glob(f"rank-{lost}.slot-1")))
    trainer.kill()
    until(lambda: not any(r.alive for d in daemons for r in d.status("job").ranks), what="the trainers' end")
    spare = start("--listen", "127.0.0.1:0", "--node", "spare")
    with Lost(daemons[lost]):
        done = recover(asked, "--yes", "--onto", f"n{lost}={spare.address}")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["outcome"] == "rebuilt"
        assert contents(rebuilt_slot(spare, lost)) == before
        assert mapped(rebuilt_slot(spare, lost)).header.version == job.version(1)
