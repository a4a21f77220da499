"""An export of a real job has the bits that torch's own checkpoint of the same step has."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from click.testing import CliRunner

import reft
from reft.cli.export import gathered, start
from reft.cli.export.command import ExportCommand
from reft.cli.export.gathered import GatheredState
from reft.cli.export.slot_reader import DamagedSlot
from reft.cli.export.sources import Erased, ExportState, MemorySource
from reft.cli.export.start import export_source
from reft.cli.main import main
from reft.errors import AttachError
from reft.wire import capsule_format, rpc
from reft.wire.manifest import layouts_of
from reft.wire.slot_format import read_head
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from tests.support import exported
from tests.support.daemons import ROOT, DaemonProcess, Site, until, vanish
from tests.support.reshaped import Ranks
from tests.support.stored import persist
from tests.support.trainers import Spec, Trainers, run

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
ENDLESS = 100_000  # steps: more than a test reaches
TRAINS_ON = {"step_s": 0.02, "tells": True}


def trained(nodes: list[DaemonProcess], kind: str, folder: Path) -> dict[str, str]:
    """Trains three steps, one rank on each node; returns the digests of torch's own checkpoint."""
    save = folder / "dcp"
    ranks = Ranks(Spec("", steps=3, options={"kind": kind, "save": str(save)}), len(nodes), [n.address for n in nodes])
    assert ranks.wait(120) == [0] * len(nodes), ranks.errors()[-4000:]
    until(lambda: not any(rank.alive for node in nodes for rank in node.status("job").ranks), what="the trainers' end")
    return exported.digests(exported.loaded(save))


def export(node: DaemonProcess | None, what: str, to: Path, *more: str, fails: bool = False) -> Any:
    daemon = ["--daemon", node.address] if node else []
    done = CliRunner().invoke(main, ["export", what, "--to", str(to), *more, *daemon], catch_exceptions=False)
    assert (done.exit_code != 0) == fails, done.output
    assert fails or not [each for each in to.parent.iterdir() if each.name.startswith(f".{to.name}")]
    return done


@pytest.mark.parametrize(
    ("kind", "world"), [("fsdp2", 4), ("hsdp2x2", 4), ("tp2xdp2", 4), ("pp2", 2), ("ddp", 2), ("ddp", 1), ("fsdp1", 2)]
)
def test_whole_tensors_come_from_any_sharding(site: Site, tmp_path: Path, kind: str, world: int) -> None:
    nodes = site.add(world)
    expected = trained(nodes, kind, tmp_path)
    export(nodes[-1], "job", tmp_path / "out")
    assert exported.digests(exported.safetensors(tmp_path / "out")) == expected
    if kind == "fsdp2":
        export(nodes[0], "job", tmp_path / "dcp2", "--format", "dcp")
        assert exported.digests(exported.loaded(tmp_path / "dcp2")) == expected


def test_lost_nodes_are_decoded(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    nodes = site.add(4)
    expected = trained(nodes, "hsdp2x2", tmp_path)
    vanish(nodes[1])
    with monkeypatch.context() as disk:  # a write through a mapping without a block kills the process
        disk.setattr(gathered, "reserve_blocks", full)
        with (
            export_source("job", lambda: nodes[0].address, -1, "") as source,
            pytest.raises(AttachError, match="No space"),
        ):
            ExportCommand(source, tmp_path / "none").run()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["dcp"]
    export(nodes[0], "job", tmp_path / "out")
    assert exported.digests(exported.safetensors(tmp_path / "out")) == expected
    for change, words in ((resized, "Attach foresaw"), (other_digests, "differs from what was saved")):
        with pytest.raises(AttachError, match=rf"(?s)capsule of rank 1 can't be used.*{words}.*does not hold step 3"):
            ExportCommand(ChangedCapsule(nodes[0].address, "job", 3, change=change), tmp_path / "none").run()


@dataclass(frozen=True)
class ChangedCapsule(MemorySource):
    """Memory in which the capsule of rank 1 at step 3 is another one."""

    change: Callable[[ExportState], None] = print

    @contextlib.contextmanager
    def open(self, erased: Erased = ()) -> Iterator[ExportState]:
        with super().open(erased) as state:
            if state.version.step == 3:
                self.change(state)
            yield state


def resized(state: ExportState) -> None:
    """Gives an inline leaf a size that nobody foresaw."""
    layouts, index = layouts_of(state.manifest)
    names, form = layouts.name_table(index[1]), layouts.symbolic[index[1]]
    record = state.capsules[1]
    tree = capsule_format.decode(record.capsule, names)
    record.capsule = capsule_format.encode({**tree, "riders": {form.leaves()[0].name: b"1"}})


def other_digests(state: ExportState) -> None:
    state.capsules[1].digests = bytes(len(state.capsules[1].digests))


@pytest.mark.slow
def test_section_of_a_lost_node_comes_from_parity(site: Site, tmp_path: Path) -> None:
    """FSDP2's shards exist once: the exchange's parity alone has the bytes of the lost node."""
    nodes = site.add(3)
    expected = trained(nodes, "fsdp2 wide", tmp_path)
    until(lambda: nodes[0].status("job").exchange.protected == 3, what="the protected step")
    vanish(nodes[1])
    with export_source("job", lambda: nodes[0].address, -1, "") as source, source.open() as state:
        assert state.sections == (1,), "the slots of rank 1 are gone"
    export(nodes[0], "job", tmp_path / "out")
    assert exported.digests(exported.safetensors(tmp_path / "out")) == expected
    with MemorySource(nodes[0].address, "job").open() as state:
        state.capsules[1].unreplicated_bytes += 4
        with pytest.raises(DamagedSlot, match=r"held .* bytes that no other slot has"):
            GatheredState.of(state)


def test_moments_that_zero1_has_once_are_whole(site: Site, tmp_path: Path) -> None:
    """Each rank has the moments of its own parameters; torch collects them on one rank."""
    nodes, save = site.add(2), tmp_path / "whole.npz"
    spec = Spec("", steps=3, options={"kind": "zero1", "save": str(save)})
    ranks = Ranks(spec, 2, [node.address for node in nodes])
    assert ranks.wait(120) == [0, 0], ranks.errors()[-4000:]
    until(lambda: not any(rank.alive for node in nodes for rank in node.status("job").ranks), what="the trainers' end")
    export(nodes[0], "job", tmp_path / "out")
    found = exported.safetensors(tmp_path / "out")
    names = [f"{layer}.{part}" for part in ("weight", "bias") for layer in ("in", "hidden0", "hidden1", "out")]
    with np.load(save) as file:
        expected = {f"model.{name[13:]}": file[name] for name in file.files if name.startswith("model ")}
        for i, name in enumerate(names):  # as the groups of the optimizer have them
            expected |= {f"optimizer.state.layers.{name}.{key}": file[f"{i} {key}"] for key in MOMENTS}
    assert exported.digests(found) == exported.digests({name: torch.tensor(each) for name, each in expected.items()})


def flip(node: DaemonProcess) -> None:
    """Changes bytes of every sealed slot of a node."""
    for path in (node.folder / "job").glob("rank-*.slot-*"):
        with open(path, "r+b") as file:
            at = read_head(file.fileno())[1].geometry.data_offset
            file.seek(at + 64)
            data = file.read(1)
            file.seek(at + 64)
            file.write(bytes([data[0] ^ 1]))


def test_damaged_chunk_comes_from_another_node_or_nothing_is_written(site: Site, tmp_path: Path) -> None:
    nodes = site.add(2)
    expected = trained(nodes, "ddp", tmp_path)
    flip(nodes[1])
    said = export(nodes[0], "job", tmp_path / "out").output
    assert exported.digests(exported.safetensors(tmp_path / "out")) == expected and "on node test#" in said
    flip(nodes[0])
    refused = export(nodes[0], "job", tmp_path / "none", fails=True)
    assert "can't be" in refused.output + refused.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["dcp", "out"]


def emptied(daemon: str) -> list[Any]:
    """Attaches a model with tensors without elements and trains a step; returns its state dicts."""
    model = torch.nn.Linear(4, 2)
    model.none = torch.nn.Parameter(torch.empty(0, 5))
    model.register_buffer("nothing", torch.empty(0, dtype=torch.int64))
    optimizer = torch.optim.AdamW(model.parameters())
    with reft.attach(model, optimizer, job="job", daemon=daemon) as session:
        (model(torch.ones(3, 4)).sum() + model.none.sum()).backward()
        optimizer.step()
        session.step_end()
        assert session.seal(60).whole
    return [model.state_dict(), optimizer.state_dict()["state"]]


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_tensors_without_elements_are_exported(site: Site, tmp_path: Path, form: str) -> None:
    (node,) = site.add(1)
    weights, moments = emptied(node.address)
    until(lambda: not any(rank.alive for rank in node.status("job").ranks), what="the session's end")
    export(node, "job", tmp_path / "out", "--format", form)
    found = (exported.loaded if form == "dcp" else exported.safetensors)(tmp_path / "out")
    names = ["weight", "bias", "none"]
    expected = {f"model.{name}": each for name, each in weights.items()}
    expected |= {f"optimizer.state.{names[i]}.{key}": each for i, own in moments.items() for key, each in own.items()}
    assert exported.digests(found) == exported.digests(expected)


def test_buffer_that_shares_memory_with_a_temporary_one_is_exported(site: Site, tmp_path: Path) -> None:
    (node,) = site.add(1)
    model = torch.nn.Linear(4, 2)
    model.register_buffer("cache", torch.arange(6.0), persistent=False)
    model.register_buffer("again", model.cache, persistent=False)
    model.register_buffer("mean", model.cache)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with reft.attach(model, optimizer, job="job", daemon=node.address) as session:
        session.step_end()
        assert session.seal(60).whole
    until(lambda: not any(rank.alive for rank in node.status("job").ranks), what="the session's end")
    export(node, "job", tmp_path / "out")
    expected = {f"model.{name}": each for name, each in model.state_dict().items()}
    assert exported.digests(exported.safetensors(tmp_path / "out")) == exported.digests(expected)


@pytest.mark.parametrize(
    ("form", "world"),
    [("safetensors", 1), ("dcp", 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("safetensors", 2), ("dcp", 1)))],
)  # fmt: skip
def test_loads_without_reft_into_one_rank_and_into_two(site: Site, tmp_path: Path, form: str, world: int) -> None:
    nodes = site.add(4)
    expected = trained(nodes, "fsdp2", tmp_path)
    export(nodes[0], "job", tmp_path / "out", "--format", form)
    if form == "safetensors":  # its names are those of the model
        expected = {name.partition(".")[2]: value for name, value in expected.items()}
    assert loaded_by(sys.executable, tmp_path / "out", world) == expected


def loaded_by(python: str | Path, folder: Path, world: int) -> Any:
    """Returns the digests that a fresh process has loaded, see `tests.support.exported`."""
    done = started(python, "-I", exported.__file__, str(folder), str(world))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def started(*command: str | Path) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=plain)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_environment_without_reft_loads_an_export(site: Site, tmp_path: Path) -> None:
    """It was made just now, with torch, safetensors and numpy alone."""
    nodes = site.add(4)
    expected = trained(nodes, "fsdp2", tmp_path)
    python = tmp_path / "fresh/bin/python"
    pins = "-c", ROOT / ".ci/constraints.txt"
    for command in (
        (sys.executable, "-m", "venv", tmp_path / "fresh"),
        (python, "-m", "pip", "install", "-q", *pins, "torch==2.13.0", "safetensors", "numpy"),
    ):
        done = started(*command)
        assert done.returncode == 0, done.stderr[-3000:]
    assert "No module named 'reft'" in started(python, "-I", "-c", "import reft").stderr
    plain = {name.partition(".")[2]: value for name, value in expected.items()}
    for form, worlds in (("safetensors", (0, 1, 2)), ("dcp", (1, 2))):
        export(nodes[0], "job", tmp_path / f"out-{form}", "--format", form)
        for world in worlds:
            found = loaded_by(python, tmp_path / f"out-{form}", world)
            assert found == (plain if form == "safetensors" and world else expected), (form, world)


def test_storage_is_exported_without_a_daemon(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "AHEAD", 1)  # fewer than there are windows
    storage = tmp_path / "storage"
    storage.mkdir()
    nodes = site.add(2, "--persist", str(storage))
    expected = trained(nodes, "fsdp2", tmp_path)
    persist(storage, nodes)
    vanish(*nodes)
    export(None, f"{storage}/job", tmp_path / "out", "--step", "3")
    assert exported.digests(exported.safetensors(tmp_path / "out")) == expected
    refused = export(None, f"{storage}/job", tmp_path / "none", "--step", "2", fails=True)
    assert "it has the steps 3" in refused.stderr
    (path,) = storage.glob("job/*/e*/node-0.0/rank-0.slot")
    with open(path, "r+b") as file:
        file.seek(read_head(file.fileno())[1].geometry.data_offset)
        file.write(b"\xff" * 64)
    assert "has a wrong digest" in export(None, f"{storage}/job", tmp_path / "none", fails=True).stderr
    assert not (tmp_path / "none").exists()


def test_weights_alone_in_another_dtype_and_in_several_files(site: Site, tmp_path: Path) -> None:
    nodes = site.add(2)
    trained(nodes, "fsdp2", tmp_path)
    out = tmp_path / "out"
    result = json.loads(
        export(nodes[0], "job", out, "--only", "weights", "--dtype", "bf16", "--max-shard", "600", "--json").stdout
    )
    wanted = {
        name: each.to(torch.bfloat16)
        for name, each in exported.loaded(tmp_path / "dcp").items()
        if name.startswith("model.")
    }
    assert exported.digests(exported.safetensors(out)) == exported.digests(wanted)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert {f"model.{name}" for name in index["weight_map"]} == set(wanted)
    assert set(index["weight_map"].values()) == {path.name for path in out.glob("*.safetensors")}
    assert index["metadata"]["total_size"] == result["bytes"] == sum(each.nbytes for each in wanted.values())
    assert not list(out.glob("optimizer*")) and "left out" in result["notes"][0]


def test_replicas_that_differ_are_never_mixed(site: Site, tmp_path: Path) -> None:
    """Both ranks sealed the step, which never became whole: each slot has a half of its own."""
    (node,) = site.add(1)
    ranks = Trainers(Spec(node.address, steps=1, options={"apart": True, "seal_s": 2}), 2)
    assert ranks.wait() == [0, 0], ranks.errors()[-3000:]
    until(lambda: not any(rank.alive for rank in node.status("job").ranks), what="the trainers' end")
    refused = export(node, "job", tmp_path / "out", fails=True)
    assert "ranks hold different bytes where they should be replicas" in refused.stderr
    assert not list(tmp_path.iterdir())


def test_lineage_of_a_job_in_memory_is_wrong_usage(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["export", "job", "--to", str(tmp_path / "out"), "--lineage", "0123456789abcdef"])
    assert done.exit_code == 2 and "only checkpoints on storage have lineages" in done.stderr


def test_nothing_is_overwritten(site: Site, tmp_path: Path) -> None:
    (node,) = site.add(1)
    trained([node], "ddp", tmp_path)
    (tmp_path / "out").mkdir()
    assert "exists" in export(node, "job", tmp_path / "out", fails=True).stderr
    assert "no folder" in export(node, "job", tmp_path / "away" / "out", fails=True).stderr
    assert os.listdir(tmp_path / "out") == []


def test_running_job_trains_on_while_a_step_of_it_is_exported(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is kept: dozens of later steps are whole when its bytes are read."""
    monkeypatch.setattr(start.os, "nice", lambda by: 0)  # this process goes on with other tests
    nodes = site.add(2)
    ranks = Trainers(Spec("", steps=ENDLESS, options=TRAINS_ON), 2, [node.address for node in nodes])
    until(lambda: ranks.step() > 5, what="the first steps")
    with export_source("job", lambda: nodes[1].address, -1, "") as source:
        held = source.held
        until(lambda: nodes[0].status("job").whole > held.step + 20, what="later whole steps")
        again = CliRunner().invoke(main, ["export", "job", "--to", str(tmp_path / "no"), "--daemon", nodes[0].address])
        assert again.exit_code == 1 and f"another export reads step {held.step}" in again.stderr
        report = ExportCommand(source, tmp_path / "out").run()
    assert report.version == held
    with export_source("job", lambda: nodes[0].address, -1, "") as source:
        assert source.held.step > held.step, "the first step was given up"
    ranks.kill()
    expected = run(Spec(nodes[0].address, job="plain", steps=held.step), 2, [node.address for node in nodes])
    found = exported.safetensors(tmp_path / "out")
    assert {
        name: hashlib.sha256(found[f"model.{name}"].reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name in expected[0]["digests"]
        if f"model.{name}" in found
    }.items() <= expected[0]["digests"].items()


def test_hold_ends_by_itself(site: Site) -> None:
    (node,) = site.add(1)
    ranks = Trainers(Spec(node.address, steps=ENDLESS, options=TRAINS_ON))
    until(lambda: ranks.step() > 5, what="the first steps")
    until(lambda: node.status("job").whole > 0, what="a whole step")
    with rpc.channel(node.address) as channel:
        # Both calls are under way at once: no hold can end before the other call comes.
        hold = pb_grpc.DaemonStub(channel).Hold
        calls = [hold.future(pb.HoldRequest(job="job", seconds=0.5), timeout=60) for _ in range(2)]
        (refused,) = [error for call in calls if (error := call.exception())]
    assert "another export reads" in refused.details()

    def is_free() -> bool:
        with contextlib.suppress(grpc.RpcError):
            node.call("Hold", pb.HoldRequest(job="job", seconds=60))
            return True
        return False

    until(is_free, what="the end of the hold")
    ranks.kill()
