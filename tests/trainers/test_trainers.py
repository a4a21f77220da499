"""Runs other people's trainers, kills and restarts them, and compares with a run without reft.

The results must be equal in every bit. Each trainer has its own virtual environment, which
`make test-trainers` sets up.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from reft.cli.demo.cluster import free_port
from reft.cli.main import main
from tests.support.daemons import ROOT, DaemonProcess, until, vanish

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(600)]

# Script with arguments → environment of its trainer. Those of DeepSpeed, Megatron-core and
# torchtitan run on two ranks only, because ZeRO, sharding, tensor parallelism and pipelines need
# several ranks.
EXAMPLES = {
    "examples/hf_trainer.py": "hf",
    "examples/hf_trainer.py --epochs 3": "hf4",
    "examples/accelerate_loop.py": "hf",
    "examples/lightning_fit.py": "lightning",
    "examples/deepspeed_zero.py": "deepspeed",
    "examples/deepspeed_zero.py --stage 3": "deepspeed",
    "examples/deepspeed_zero.py --stage 1 --accumulate fp32": "deepspeed",
    "examples/deepspeed_zero.py --stage 0": "deepspeed",
    "tests/support/deepspeed_pipeline.py": "deepspeed",
    "examples/megatron_gpt.py": "megatron",
    "examples/megatron_gpt.py --tp 2": "megatron",
    "examples/megatron_gpt.py --pp 2": "megatron",
    "examples/megatron_gpt.py --pp 2 --vp 2": "megatron",
    "examples/megatron_gpt.py --ep 2": "megatron",
    "examples/torchtitan_llama.py": "torchtitan",
    "examples/torchtitan_llama.py --tp 2": "torchtitan",
    "tests/support/torchao_low_bit.py int8 AdamW8bit": "torchao",
    "tests/support/torchao_low_bit.py float8 AdamWFp8": "torchao",
    "tests/support/torchao_low_bit.py int8 AdamW4bit": "torchao",
}
# Each of these is run in one test only.
ODD = {
    "tests/support/lightning_hooks.py": "lightning",
    "tests/support/lightning_iterable.py": "lightning",
    "tests/support/lightning_resumed.py": "lightning",
    "tests/support/lightning_unfreezing.py": "lightning",
    "tests/support/resumed_trainer.py": "hf",
    "tests/support/resumed_trainer.py of-4.57": "hf4",
    "tests/support/scaled_trainer.py": "hf",
    "tests/support/scaled_trainer.py of-4.57": "hf4",
    "tests/support/trainer_low_bit.py adamw_torch_8bit": "hf",
    "tests/support/trainer_low_bit.py adafactor": "hf",
    "tests/support/trainer_low_bit.py int8": "hf",
    "tests/support/trainer_low_bit.py float8": "hf",
    "tests/support/trainer_low_bit.py float8_training": "hf",
}
# Script with arguments → environment of its trainer, and the number of nodes, each with one rank.
# Some state has one holder. In the examples of DeepSpeed and Megatron-core this state is so small
# that it travels in capsules, unless the model is wider.
HELD_ONCE = {
    "examples/deepspeed_zero.py --stage 1": ("deepspeed", 2),
    "examples/deepspeed_zero.py --stage 2": ("deepspeed", 2),
    "examples/deepspeed_zero.py --stage 3": ("deepspeed", 2),
    "examples/deepspeed_zero.py --stage 1 --width 16384": ("deepspeed", 2),
    "examples/deepspeed_zero.py --stage 2 --width 16384": ("deepspeed", 2),
    "examples/deepspeed_zero.py --stage 3 --width 16384": ("deepspeed", 2),
    "examples/megatron_gpt.py --pp 2 --hidden 32": ("megatron", 4),
    "examples/megatron_gpt.py --pp 2 --hidden 128": ("megatron", 4),
    "examples/torchtitan_llama.py": ("torchtitan", 2),
    "tests/support/expert_parallel.py": ("torch", 2),
}
WITHIN_40_S = ("tests/support/expert_parallel.py",)  # run by `make test-trainers`
EXCHANGED = ("--width", "--hidden 128", "torchtitan", "expert_parallel")  # these exchange parity
# Minutes; run with -m "trainers and slow".
SLOW = ("--ep 2",)
OTHER_MOMENTS = [pytest.param(seed, marks=pytest.mark.chaos) for seed in (1, 2, 3)]
# In all other runs of these, no node is lost. A lost node takes state that nobody foresaw with it,
# until the ranks have a layout for it. `e2e/test_moves` waits for that layout; torchao's runs do
# not.
NO_LOST_NODE = ("deepspeed", "megatron", "torchtitan", "torchao")
ALONE = [script for script, trainer in EXAMPLES.items() if trainer not in NO_LOST_NODE]
# Modules that a trainer's workers import. Each run imports them once, and forks.
IMPORTS = {
    "hf": "transformers.trainer+transformers.models.gpt2.modeling_gpt2+accelerate",
    "hf4": "transformers.trainer+transformers.models.gpt2.modeling_gpt2+accelerate",
    "lightning": "lightning.pytorch",
    "deepspeed": "deepspeed+deepspeed.pipe",
    "megatron": "megatron_cpu+megatron.core.models.gpt+megatron.core.optimizer+megatron.core.pipeline_parallel",
    "torchtitan": "tests.support.titan_on_cpu+torchtitan.trainer+torchtitan.models.llama3",
    "torchao": "torch._dynamo+torchao.optim+torchao.quantization",
    "torch": "torch._dynamo",
}
# torchao compiles the step of its optimizers for each shape, which takes minutes.
SETTINGS = {trainer: {"TORCHDYNAMO_DISABLE": "1"} for trainer in ("torchao", "hf")}
TORCHRUN = [
    "--max-restarts=4",
    "--rdzv-id=r",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=127.0.0.1:0",
    "--local-addr=127.0.0.1",
]


class Example:
    """An example, run in its trainer's environment.

    Args:
        example: one of EXAMPLES, ODD or HELD_ONCE.
        folder: for the results.
    """

    def __init__(self, example: str, folder: Path) -> None:
        self.trainer, self.nodes = trainer, _ = HELD_ONCE.get(example) or ((EXAMPLES | ODD)[example], 2)
        own = ROOT / ".venv-trainers" / trainer / "bin/python"
        self.python = Path(sys.executable) if trainer == "torch" else own
        assert self.python.exists(), "run make trainers, which sets it up"
        script, *arguments = example.split()
        self.command, self.folder = [str(ROOT / script), *arguments], folder
        self._torchrun = ["-m", "tests.support.warm_torchrun", IMPORTS[trainer], *TORCHRUN]

    def run_ranks(self, name: str, count: int = 2, **changes: str) -> subprocess.CompletedProcess[str]:
        """Runs the example under torchrun."""
        return self.run(name, *self._torchrun, f"--nproc-per-node={count}", **changes)

    def run(self, name: str, *launcher: str, **changes: str) -> subprocess.CompletedProcess[str]:
        """Runs the example to its end."""
        with self.start(name, *launcher, **changes) as process:
            return ended(process)

    def start(self, name: str, *launcher: str, **changes: str) -> subprocess.Popen[str]:
        """Starts the example as a process in its own session."""
        path = os.pathsep.join(str(ROOT / each) for each in (".", "daemon", "examples"))
        paths = os.pathsep.join([str(self.python.parent), os.environ["PATH"]])  # DeepSpeed looks for ninja
        environment = {
            **os.environ, "PATH": paths, "DS_ACCELERATOR": "cpu", "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1",
            "JE_ARROW_MALLOC_CONF": "background_thread:false",  # Arrow's allocator starts a thread, which no fork copies
            "TORCH_EXTENSIONS_DIR": str(self.python.parents[1] / "extensions"), **SETTINGS.get(self.trainer, {}), **changes,
        }  # fmt: skip
        command = [self.python, *launcher, ROOT / "tests/support/run_example.py", self.folder / name, *self.command]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=self.folder,
            start_new_session=True,
        )  # fmt: skip

    def result(self, name: str, rank: int = 0) -> dict[str, Any]:
        return json.loads((self.folder / f"{name}.{rank}.json").read_text())


def ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Waits for the end of a process, and returns its result."""
    try:
        out, errors = process.communicate(timeout=280)
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)  # to torchrun, which ends its workers
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


@pytest.fixture
def example(request, tmp_path) -> Example:
    return Example(request.param, tmp_path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Callable[[Example], list[dict[str, Any]]]:
    """Returns a function: example → results of its ranks without reft. Each runs once."""
    finished: dict[tuple[Any, ...], Example] = {}

    def of(example: Example) -> list[dict[str, Any]]:
        key = (*example.command, example.nodes)
        if key not in finished:
            alone = copy.copy(example)
            alone.folder = tmp_path_factory.mktemp("plain")
            done = alone.run_ranks("plain", example.nodes, REFT_MODE="off")
            assert done.returncode == 0, done.stderr
            finished[key] = alone
        return [finished[key].result("plain", rank) for rank in range(example.nodes)]

    return of


# Slots for all steps until a kill. So no step is skipped while a busy daemon does not answer, and
# the kill happens.
EVERY_STEP = {"REFT_SLOTS": "16"}


def restored(done: subprocess.CompletedProcess[str]) -> list[int]:
    """Returns the steps from which the run continued."""
    return [int(step) for step in re.findall(r"restored step (\d+) ", done.stderr)]


def assert_ends_alike(after: dict[str, Any], plain: dict[str, Any]) -> None:
    """Asserts that the losses since the last restart, and the final state, are equal."""
    losses = after.pop("losses")
    assert 0 < len(losses) <= len(plain["losses"])
    assert losses == plain.pop("losses")[-len(losses) :]
    assert after == plain


@pytest.mark.parametrize("example", ALONE, indirect=True)
def test_one_process_killed_and_started_again(example, daemon):
    reft = {"REFT_DAEMON": daemon.address, "REFT_JOB": "mine", **EVERY_STEP}
    plain = example.run("plain", REFT_MODE="off")
    assert plain.returncode == 0, plain.stderr
    killed = example.run("killed", REFT_FAILPOINTS="snapshot.chunk:kill:from=14", **reft)
    assert killed.returncode == -9, killed.stderr
    after = example.run("after", **reft)
    assert after.returncode == 0, after.stderr
    assert restored(after) and 5 < restored(after)[0] < 14
    assert_ends_alike(example.result("after"), example.result("plain"))


def killed_and_started_again(
    example: Example, daemon: DaemonProcess, step: int, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Kills the example's one process after a step, starts it again, and returns its last run.

    That run must go on from the step, and end like an undisturbed run.
    """
    reft = {"REFT_DAEMON": daemon.address, "REFT_JOB": "mine", **environment, **EVERY_STEP}
    plain = example.run("plain", REFT_MODE="off")
    assert plain.returncode == 0, plain.stderr
    killed = example.run("killed", REFT_FAILPOINTS=f"snapshot.chunk:kill:from={step + 1}", **reft)
    assert killed.returncode == -9, killed.stderr
    after = example.run("after", **reft)
    assert after.returncode == 0, after.stderr
    assert restored(after) == [step]
    assert_ends_alike(example.result("after"), example.result("plain"))
    return after


@pytest.mark.parametrize("step", [12, 15], ids=["the last of an epoch", "within an epoch"])
def test_what_lightning_changes_after_a_batch_and_an_epoch_is_restored(step, daemon, tmp_path):
    """Restores what Lightning changes after a batch and an epoch.

    This is: an average in a module's hook, the count of early stopping, a scheduler that follows a
    metric, and modules of callbacks.
    """
    example = Example("tests/support/lightning_hooks.py", tmp_path)
    after = killed_and_started_again(example, daemon, step)
    assert "what Hooked.on_save_checkpoint adds to a checkpoint" in after.stderr


@pytest.mark.parametrize(
    ("step", "order"), [(3, "first"), (4, "first"), (6, "first"), (8, "first"), (13, "first"), (6, "last")]
)
def test_a_backbone_that_lightning_unfreezes_is_restored(step, order, daemon, tmp_path):
    """BackboneFinetuning unfreezes the backbone at step 4, and gives it a group of its own."""
    example = Example("tests/support/lightning_unfreezing.py", tmp_path)
    after = killed_and_started_again(example, daemon, step, ORDER=order)
    assert ("1 group added to optimizer.0" in after.stderr) == (step > 4)


RESUMED = ["tests/support/resumed_trainer.py", "tests/support/resumed_trainer.py of-4.57"]


@pytest.mark.parametrize("script", RESUMED)
def test_trainer_resumes_from_its_own_checkpoint_and_then_from_memory(script, daemon, tmp_path):
    """The first checkpoint lies within an epoch. Then Trainer is killed at the end of an epoch.

    Memory then holds a step before Trainer's newest checkpoint.
    """
    example = Example(script, tmp_path)
    first = example.run("first", REFT_MODE="off", STOP_AT="8")
    assert first.returncode == 0, first.stderr
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "first of all")
    plain = example.run("plain", REFT_MODE="off")
    assert plain.returncode == 0, plain.stderr
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "first of all").rename(tmp_path / "checkpoints")
    reft = {"REFT_DAEMON": daemon.address, "REFT_JOB": "mine", **EVERY_STEP}
    killed = example.run("killed", REFT_FAILPOINTS="snapshot.chunk:kill:from=4", **reft)
    assert killed.returncode == -9, killed.stderr
    after = example.run("after", **reft)
    assert after.returncode == 0, after.stderr
    assert restored(after) == [3] and "its checkpoint of step 12, but reft goes on from step 11" in after.stderr
    assert_ends_alike(example.result("after"), example.result("plain"))


@pytest.mark.parametrize("script", RESUMED)
def test_trainer_resumes_from_storage_where_it_has_no_checkpoint(script, site, tmp_path):
    """Trainer's own checkpoints, all memory and the daemon are gone. Without storage it refuses."""
    example = Example(script, tmp_path)
    plain = example.run("plain", REFT_MODE="off")
    assert plain.returncode == 0, plain.stderr
    shutil.rmtree(tmp_path / "checkpoints")
    storage = tmp_path / "storage"
    storage.mkdir()
    (daemon,) = site.add(1, "--persist", str(storage))
    reft = {"REFT_DAEMON": daemon.address, "REFT_JOB": "mine", **EVERY_STEP}
    refused = example.run("refused", RESUMES="1", **reft)
    assert refused.returncode == 1 and "no step of job mine is held" in refused.stderr, refused.stderr
    killed = example.run("killed", REFT_FAILPOINTS="snapshot.chunk:kill:from=10", **reft)
    assert killed.returncode == -9, killed.stderr
    assert persisted_step(daemon) == 9
    vanish(daemon)
    shutil.rmtree(tmp_path / "checkpoints")
    (daemon,) = site.add(1, "--persist", str(storage))
    after = example.run("after", **{**reft, "REFT_DAEMON": daemon.address, "RESUMES": "1"})
    assert after.returncode == 0, after.stderr
    assert restored(after) == [9] and "GOES ON FROM STORAGE: step 9 " in after.stderr
    assert_ends_alike(example.result("after"), example.result("plain"))


@pytest.mark.parametrize(
    "limit", [4, pytest.param(6, marks=pytest.mark.chaos)], ids=["within an epoch", "the end of it"]
)
@pytest.mark.parametrize("script", RESUMED)
def test_a_training_that_ended_goes_on_with_a_higher_limit(script, limit, daemon, tmp_path):
    example = Example(script, tmp_path)
    reft = {"REFT_DAEMON": daemon.address, "REFT_JOB": "mine", **EVERY_STEP}
    runs = {"plain": {"REFT_MODE": "off", "MAX_STEPS": "8"}, "first": {**reft, "MAX_STEPS": str(limit)}}
    for name, environment in {**runs, "after": {**reft, "MAX_STEPS": "8"}}.items():
        done = example.run(name, **environment)
        assert done.returncode == 0, done.stderr
        shutil.rmtree(tmp_path / "checkpoints")
    assert restored(done) == [limit]
    assert_ends_alike(example.result("after"), example.result("plain"))


@pytest.mark.parametrize("step", [6, 8], ids=["within an epoch", "the last of an epoch"])
def test_lightning_has_a_checkpoint_of_its_own_and_goes_on_from_memory(step, daemon, tmp_path):
    """Lightning reads a checkpoint of step 4 or 8, whose loops and moments it would load later."""
    example = Example("tests/support/lightning_resumed.py", tmp_path)
    after = killed_and_started_again(example, daemon, step, CHECKPOINTS=str(tmp_path / "checkpoints"))
    assert f"its checkpoint of step {step // 4 * 4}, but reft goes on from step {step}" in after.stderr


@pytest.mark.parametrize(
    "step",
    [pytest.param(2, marks=pytest.mark.chaos), 4, 6],
    ids=["within an epoch", "the last of it", "within a later one"],
)
def test_lightning_goes_on_within_data_of_unknown_length(step, daemon, tmp_path):
    killed_and_started_again(Example("tests/support/lightning_iterable.py", tmp_path), daemon, step)


@pytest.mark.parametrize(
    "validates", [{}, pytest.param({"VALIDATES": "1"}, marks=pytest.mark.chaos)], ids=["no validation", "a validation"]
)
def test_lightning_goes_on_with_more_epochs_of_unknown_length(validates, daemon, tmp_path):
    example = Example("tests/support/lightning_iterable.py", tmp_path)
    reft = {"REFT_DAEMON": daemon.address, "REFT_JOB": "mine", **EVERY_STEP}
    runs = {"plain": {"REFT_MODE": "off", "EPOCHS": "2"}, "first": {**reft, "EPOCHS": "1"}}
    for name, environment in {**runs, "after": {**reft, "EPOCHS": "2"}}.items():
        done = example.run(name, **environment, **validates)
        assert done.returncode == 0, done.stderr
    assert restored(done) == [4]
    assert_ends_alike(example.result("after"), example.result("plain"))


@pytest.mark.chaos
@pytest.mark.parametrize("example", ["examples/hf_trainer.py", "examples/hf_trainer.py --epochs 3"], indirect=True)
def test_trainer_goes_on_from_the_last_step_of_an_epoch(example, daemon):
    killed_and_started_again(example, daemon, 12)


@pytest.mark.chaos
@pytest.mark.parametrize("end", ["STOP_AT", "MAX_STEPS"])
@pytest.mark.parametrize("script", RESUMED)
def test_a_training_that_was_stopped_early_does_not_go_on(script, end, daemon, tmp_path):
    """A callback stops it within an epoch, or a limit that the next run has, too."""
    example = Example(script, tmp_path)
    reft = {"REFT_DAEMON": daemon.address, "REFT_JOB": "mine", end: "8", **EVERY_STEP}
    first = example.run("first", **reft)
    assert first.returncode == 0, first.stderr
    again = example.run("again", **{**reft, "STOP_AT": "-1"})
    assert again.returncode == 0, again.stderr
    assert restored(again) == [8]
    assert_ends_alike(example.result("again"), example.result("first"))


@pytest.mark.chaos
@pytest.mark.parametrize("step", [2, 7], ids=["while steps are skipped", "later"])
@pytest.mark.parametrize("script", ["tests/support/scaled_trainer.py", "tests/support/scaled_trainer.py of-4.57"])
def test_the_gradient_scaler_of_trainer_is_restored(script, step, daemon, tmp_path):
    example = Example(script, tmp_path)
    killed_and_started_again(example, daemon, step)
    after, plain = example.result("after"), example.result("plain")
    assert after["scale"] == plain["scale"] < 2.0**127, "steps were skipped"


@pytest.mark.chaos
@pytest.mark.parametrize("kind", ["adamw_torch_8bit", "adafactor", "int8", "float8", "float8_training"])
def test_low_bit_state_under_trainer_is_restored(kind, daemon, tmp_path):
    """Each kind of state that torchao, PEFT and transformers make, under Hugging Face's Trainer."""
    example = Example(f"tests/support/trainer_low_bit.py {kind}", tmp_path)
    killed_and_started_again(example, daemon, 15)


def cases() -> Iterator[Any]:
    """Yields (example, seed): one moment of the kill for each example.

    Examples without arguments have three more moments.
    """
    for script in EXAMPLES:
        yield pytest.param(script, 0, marks=pytest.mark.slow if any(word in script for word in SLOW) else ())
        if script.startswith("examples/") and " " not in script:
            yield from (pytest.param(script, *seed.values, marks=seed.marks) for seed in OTHER_MOMENTS)


@pytest.mark.parametrize(("example", "seed"), list(cases()), indirect=["example"])
def test_a_killed_rank_and_then_all_of_them(example, seed, plain, daemon):
    """Kills one rank, then all ranks, in mid-copy; torchrun restarts them."""
    chance = random.Random(seed)
    rank, first, second = chance.randrange(2), chance.randrange(4, 8), chance.randrange(11, 16)
    if example.trainer == "torchao":  # its first steps wait for a layout, and are sealed
        first, second = first + 16, second + 16
    faults = f"snapshot.chunk:kill:from={first}:rank={rank};snapshot.chunk:kill:from={second}"
    done = example.run_ranks("done", REFT_FAILPOINTS=faults, REFT_DAEMON=daemon.address, **EVERY_STEP)
    assert done.returncode == 0, done.stderr
    assert len(restored(done)) == 2
    for each, expected in enumerate(plain(example)):
        assert_ends_alike(example.result("done", each), expected)


@contextmanager
def one_on_each(
    nodes: list[DaemonProcess], example: Example, name: str, **changes: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts a rank on each of the nodes, without torchrun.

    It kills the rest at the end. All daemons are on one host.
    """
    port, world = str(free_port()), str(len(nodes))
    with ExitStack() as stack:
        ranks = []
        for rank, node in enumerate(nodes):
            process = example.start(
                name, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world,
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port, REFT_DAEMON=node.address, REFT_JOB="mine", **changes,
            )  # fmt: skip
            ranks.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield ranks


@pytest.mark.parametrize("seed", [0, *OTHER_MOMENTS])
@pytest.mark.parametrize("example", ALONE, indirect=True)
def test_a_lost_node(example, seed, plain, site):
    """A node is lost with its rank and its memory, in mid-copy. A new node replaces it."""
    chance = random.Random(f"node {seed}")
    lost, step = chance.randrange(2), chance.randrange(6, 15)
    nodes = site.add(2)
    stops = f"snapshot.chunk:stop:rank={lost}:from={step}"
    with one_on_each(nodes, example, "lost", REFT_FAILPOINTS=stops, **EVERY_STEP) as ranks:
        victim = psutil.Process(ranks[lost].pid)
        until(lambda: victim.status() == psutil.STATUS_STOPPED or ranks[lost].poll() is not None, 200, f"step {step}")
        assert ranks[lost].poll() is None, ended(ranks[lost]).stderr
        until(lambda: nodes[0].status("mine").whole > 0, what="a whole step")
        whole = nodes[0].status("mine").whole
    vanish(nodes[lost])
    nodes[lost] = site.add(1)[0]
    with one_on_each(nodes, example, "done") as ranks:
        done = [ended(rank) for rank in ranks]
    assert [each.returncode for each in done] == [0, 0], "".join(each.stderr for each in done)
    assert restored(done[0])[0] >= whole
    for each, expected in enumerate(plain(example)):
        assert_ends_alike(example.result("done", each), expected)


def persisted_step(node: DaemonProcess) -> int:
    """Has the newest step written to storage, and returns that step."""
    done = CliRunner().invoke(main, ["persist", "mine", "--json", "--daemon", node.address], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    step: int = json.loads(done.stdout)["step"]
    return step


FROM_STORAGE = [
    "examples/hf_trainer.py",
    "examples/hf_trainer.py --epochs 3",
    "examples/lightning_fit.py",
    "examples/torchtitan_llama.py",
]


@pytest.mark.parametrize("example", FROM_STORAGE, indirect=True)
def test_all_memory_is_gone_and_the_trainer_goes_on_from_storage(example, plain, site, tmp_path):
    """A rank stops in mid-copy; a checkpoint is written. Then all processes and nodes are lost."""
    storage = tmp_path / "storage"
    storage.mkdir()
    nodes = site.add(2, "--persist", str(storage))
    with one_on_each(
        nodes, example, "lost", REFT_FAILPOINTS="snapshot.chunk:stop:rank=1:from=11", **EVERY_STEP
    ) as ranks:
        victim = psutil.Process(ranks[1].pid)
        until(lambda: victim.status() == psutil.STATUS_STOPPED or ranks[1].poll() is not None, 200, "step 11")
        assert ranks[1].poll() is None, ended(ranks[1]).stderr
        step = persisted_step(nodes[0])
        for rank in ranks:
            rank.kill()
    vanish(*nodes)
    nodes = site.add(2, "--persist", str(storage))
    with one_on_each(nodes, example, "done") as ranks:
        after = [ended(rank) for rank in ranks]
    assert [each.returncode for each in after] == [0, 0], "".join(each.stderr for each in after)
    assert f"GOES ON FROM STORAGE: step {step} " in after[0].stderr and 5 < step <= 11
    for each, expected in enumerate(plain(example)):
        assert_ends_alike(example.result("done", each), expected)


def held_once() -> Iterator[Any]:
    """Yields (example, seed): two moments of a lost node for each example."""
    for script in HELD_ONCE:
        for seed in (0, 1):
            yield pytest.param(script, seed, marks=[] if script in WITHIN_40_S and not seed else pytest.mark.chaos)


def survives_any_node(nodes: list[DaemonProcess]) -> int:
    """Returns the newest step that is announced to survive the loss of any node, or -1."""
    statuses = [node.status("mine") for node in nodes]
    exchanges = [status.exchange.protected for status in statuses if status.HasField("exchange")]
    return max(exchanges or [status.whole for status in statuses])


def exposed(node: DaemonProcess) -> list[str]:
    """Returns what `status` says of state that a lost node would take with it."""
    done = CliRunner().invoke(main, ["status", "--json"], env={"REFT_DAEMON": node.address}, catch_exceptions=False)
    return [each["what"] for job in json.loads(done.output)["jobs"] for each in job["protection"]["exposed"]]


@pytest.mark.parametrize(("example", "seed"), list(held_once()), indirect=["example"])
def test_a_lost_node_takes_the_job_back_to_the_protected_step(example, seed, plain, site):
    """A node is lost with its rank and memory, in mid-copy or after it. A new one replaces it."""
    chance = random.Random(f"protected {example.command[1:]} {seed}")
    lost, step = chance.randrange(example.nodes), chance.randrange(6, 15)
    stops = f"snapshot.{chance.choice(['chunk', 'landed'])}:stop:rank={lost}:from={step}"
    nodes = site.add(example.nodes)
    with one_on_each(nodes, example, "lost", REFT_FAILPOINTS=stops) as ranks:
        victim = psutil.Process(ranks[lost].pid)
        until(lambda: victim.status() == psutil.STATUS_STOPPED or ranks[lost].poll() is not None, 200, f"step {step}")
        assert ranks[lost].poll() is None, ended(ranks[lost]).stderr
        until(lambda: survives_any_node(nodes) > 0, what="a step that survives any node")
        protected, status = survives_any_node(nodes), nodes[0].status("mine")
        ranks[lost].kill()
        vanish(nodes[lost])
    nodes[lost] = site.add(1)[0]
    with one_on_each(nodes, example, "done") as ranks:
        done = [ended(rank) for rank in ranks]
    assert {each.returncode for each in done} == {0}, "".join(each.stderr for each in done)
    print(f"{stops}: step {status.whole} was whole, {protected} survived any node; went on from {restored(done[0])}")
    assert restored(done[0])[0] >= protected
    assert status.HasField("exchange") == any(word in " ".join(example.command) for word in EXCHANGED)
    assert exposed(nodes[0]) == []
    for each, expected in enumerate(plain(example)):
        assert_ends_alike(example.result("done", each), expected)


def whole(example: Example, name: str, ranks: int) -> dict[str, bytes]:
    """Returns every weight, main parameter and moment of the whole model, merged from all ranks."""
    parts: dict[str, dict[int, bytes]] = {}
    for rank in range(ranks):
        for what, (first, data) in example.result(name, rank)["optimizer"]["runs"].items():
            assert parts.setdefault(what, {}).setdefault(first, bytes.fromhex(data)) == bytes.fromhex(data), what
    return {what: b"".join(runs[first] for first in sorted(runs)) for what, runs in parts.items()}


@pytest.mark.slow  # two minutes
def test_megatron_is_restored_with_other_stages_and_another_number_of_ranks(daemon, tmp_path):
    """Two stages, then one rank, then two data-parallel ranks. Only the first run trains."""
    shapes = {"stages": ("--pp 2", 2), "alone": ("", 1), "replicas": ("", 2)}
    states = {}
    for name, (arguments, ranks) in shapes.items():
        example = Example(f"examples/megatron_gpt.py {arguments}".strip(), tmp_path)
        example.command += ["--steps", "6"]
        done = example.run_ranks(name, ranks, REFT_DAEMON=daemon.address)
        assert done.returncode == 0, done.stderr
        assert restored(done) == ([] if name == "stages" else [6])
        states[name] = whole(example, name, ranks)
    assert len(states["stages"]) > 60 and {len(state) for state in states["stages"].values()} > {
        64 * 32 * 2,
        64 * 32 * 4,
    }
    assert states["alone"] == states["stages"]
    assert states["replicas"] == states["stages"]
