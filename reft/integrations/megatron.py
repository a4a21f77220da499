"""Megatron-core: `attach` after `get_megatron_optimizer`.

    session = attach(model_chunks, optimizer, opt_param_scheduler, data)
    for step in session.steps(total):
        optimizer.zero_grad()
        losses = forward_backward(data_iterator=data, model=model_chunks, ...)
        optimizer.step()
        opt_param_scheduler.step(samples)

`reft.client.state.extract.megatron_modules` and `.megatron` say which state of models and
optimizers is held. Also held: Megatron's own random states, from which dropout in tensor-parallel
regions draws. Copies run in the waits of the pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import reft
from reft.client.schedule.hooks.megatron import IdleTimers
from reft.client.session import Session
from reft.client.state.extract.megatron_modules import TESTED, unwrapped
from reft.console import say
from reft.errors import UnsupportedState
from reft.integrations.checks import Tested

MEGATRON = Tested("megatron-core", TESTED)
EXPERT = "expert-parallel-rng"  # the random state of regions within experts


class RandomStates:
    """The states of Megatron's random tracker, as an object for `reft.attach(state=...)`.

    Args:
        tracker: `megatron.core.tensor_parallel.get_cuda_rng_tracker()`.
        place: this rank's tensor-parallel rank; Megatron seeds the states by it.
        expert_place: this rank's ranks in expert parallelism, by which the states of `EXPERT` are
            seeded.

    Raises:
        UnsupportedState: a state is not plain bytes.
    """

    def __init__(self, tracker: Any, place: int, expert_place: Sequence[int] = (0, 0)) -> None:
        MEGATRON.need(tracker, "get_states", "set_states")
        if not all(isinstance(state, torch.Tensor) for state in tracker.get_states().values()):
            raise UnsupportedState(
                "Megatron's random states are generators of CUDA graphs, which reft can't hold.",
                "model_parallel_cuda_manual_seed(..., use_cudagraphable_rng=False)",
            )
        self._tracker, self._place, self._expert_place = tracker, place, list(expert_place)

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's places, and name → state (uint8, on the host)."""
        return {"tp": self._place, "expert": self._expert_place, "states": self._tracker.get_states()}

    def load_state_dict(self, held: Mapping[str, Any]) -> None:
        """Continues in each region with the draw after the mark."""
        self.load_state_dicts([held])

    def load_state_dicts(self, held: Sequence[Mapping[str, Any]]) -> None:
        """Loads each state of the first old rank that had this rank's place.

        If there is none, the state stays as seeded, and a line says so. The state of another place
        would make its dropout repeat here.

        Args:
            held: the states of all old ranks, in a job of another size.
        """
        states = dict(self._tracker.get_states())
        for name in dict.fromkeys([*states, *(name for old in held for name in old["states"])]):
            key, place = ("expert", self._expert_place) if name == EXPERT else ("tp", self._place)
            # Capsules of earlier builds have no "expert".
            found = (old["states"][name] for old in held if old.get(key, place) == place and name in old["states"])
            state = next(found, None)
            if state is None:
                kind = "ranks in expert parallelism" if name == EXPERT else "tensor-parallel rank"
                say(f"no old rank had the {kind} {place}: Megatron's random state {name} stays as it was seeded.")
            else:
                states[name] = state
        self._tracker.set_states(states)


class Schedule:
    """Megatron's OptimizerParamScheduler, as an object for `reft.attach(state=...)`.

    Its `load_state_dict` adds the steps of the state to those it has. A script that has loaded a
    checkpoint before attach has some.

    Args:
        scheduler: the OptimizerParamScheduler.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        """Returns the scheduler's settings and number of steps."""
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, held: Mapping[str, Any]) -> None:
        """Continues at the held number of steps."""
        self._scheduler.num_steps = 0
        self._scheduler.load_state_dict(dict(held))


def attach(
    model_chunks: Any,
    optimizer: Any,
    opt_param_scheduler: Any = None,
    data: Any = None,
    *,
    state: Mapping[str, Any] | None = None,
    **options: Any,
) -> Session:
    """Attaches a Megatron-core job; restores its state after a restart. Call it on every rank.

    Args:
        model_chunks: of this rank, wrapped in Megatron's DistributedDataParallel. A list with
            virtual stages.
        optimizer: what `get_megatron_optimizer` returned.
        opt_param_scheduler: OptimizerParamScheduler, or None.
        data: the source of the micro batches, with state_dict and load_state_dict: an iterator, or
            consumed samples. With virtual stages a list, one for each chunk. None: the data
            position is not held, and a line says so, unless `state` has an object "data".
        state: name → any other object of the training state.
        options: for `reft.attach`.

    Raises:
        reft.errors.ReftError: see `reft.attach`; or the job uses a feature that is not supported,
            which the message names.
    """
    from megatron.core import parallel_state as ranks
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    chunks: Sequence[Any] = model_chunks if isinstance(model_chunks, (list, tuple)) else [model_chunks]
    expert_place = ranks.get_expert_tensor_parallel_rank(), ranks.get_expert_model_parallel_rank()
    states = RandomStates(get_cuda_rng_tracker(), ranks.get_tensor_model_parallel_rank(), expert_place)
    objects: dict[str, Any] = {"random": states}
    positions = data if isinstance(data, (list, tuple)) else [data]
    schedule = Schedule(opt_param_scheduler) if hasattr(opt_param_scheduler, "num_steps") else opt_param_scheduler
    named = {"lr": schedule, **{f"data.{i}" if i else "data": each for i, each in enumerate(positions)}}
    objects |= {name: each for name, each in named.items() if each is not None} | dict(state or {})
    if "data" not in objects and torch.distributed.get_rank() == 0:
        say("data= was not passed, so no position in the data is held. Pass its source: attach(..., data=...).")
    session = reft.attach(list(chunks), optimizer, state=objects, **options)
    for config in {id(config): config for config in (unwrapped(chunk).config for chunk in chunks)}.values():
        config.timers = IdleTimers(session.idle, config.timers)
    return session
