"""What modules keep beside their tensors (`get_extra_state`: fp8 scales, …), asked at every mark.

    attach    asked twice: too slow, too large or pickled ─► refused, with the module's name
    mark      asked again, in the training thread: the answer is the state of this step;
              too slow or too large now ─► fewer steps are taken (core/commit/cost_spacing.py)
    restore   a value that `set_extra_state` would unpickle ─► refused, unless the user allows it

An answer is never reused for a later step. Asking may wait for a device, and that counts as cost of
the snapshot: with every="auto" the measured interval grows.

Some modules answer with a pickle, and unpickle what they are handed. A pickle runs code, and what
is restored may come from another node. So `Config(allow_pickled_extra_state=True)` is needed.
"""

from __future__ import annotations

import math
import pickletools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from reft.client.state.serialization import to_plain
from reft.core.commit.cost_spacing import BYTES_MAX, SECONDS_MAX, ExtraStateCost
from reft.errors import RestoreError, UnsupportedState
from reft.wire import capsule_format

ALLOW = "Config(allow_pickled_extra_state=True), or REFT_ALLOW_PICKLED_EXTRA_STATE=1, if you trust all nodes of the job"
EXTRA_STATE = ".extra_state"  # follows a module's name: the name of its extra state in state=
# How torch.save and each modern pickle begin. A mark compares only this, since parsing takes long;
# attach parses each answer once.
BEGINNINGS = (b"PK\x03\x04", *(bytes((0x80, protocol)) for protocol in range(2, 6)))


@dataclass
class ExtraState:
    """A module's extra state, wrapped like an object of the user.

    Attributes:
        name: name of the module in the job.
        module: the module.
        allows_pickles: whether the user has allowed pickled answers.
        cost: what the newest answer cost; None if no answer came since it was last read.
    """

    name: str
    module: nn.Module
    allows_pickles: bool = False
    cost: ExtraStateCost | None = field(default=None, compare=False)

    def state_dict(self) -> dict[str, Any]:
        """Returns the module's answer for this step.

        Raises:
            UnsupportedState: the answer is a pickle.
        """
        began_s = time.perf_counter()
        answer = self.module.get_extra_state()
        self.cost = ExtraStateCost(time.perf_counter() - began_s, _nbytes(answer), self.name)
        if not self.allows_pickles and any(data.startswith(BEGINNINGS) for data in _raw(answer)):
            raise self.pickled()
        return {"extra_state": answer}

    def pickled(self) -> UnsupportedState:
        """Returns the error for an answer that is a pickle."""
        kind = type(self.module).__name__
        return UnsupportedState(
            f"{self.name}: {kind}.get_extra_state returns a pickle, which a restore would execute.", ALLOW
        )

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Hands an earlier answer to the module.

        Raises:
            RestoreError: the module could unpickle the answer.
        """
        answer = saved["extra_state"]
        if not self.allows_pickles and any(is_pickle(data) for data in _raw(answer)):
            raise RestoreError(
                f"{self.name}: the snapshot's extra state is a pickle, and {type(self.module).__name__}.set_extra_state may "
                "execute it.",
                ALLOW,
            )
        self.module.set_extra_state(answer)


def extra_state_of(name: str, module: nn.Module, allows_pickles: bool) -> ExtraState | None:
    """Returns the extra state of a module; None if its class has none.

    That is so if `get_extra_state` is torch's, or is declared to return None, as in Megatron's own
    layers.
    """
    method = type(module).get_extra_state
    returned = getattr(method, "__annotations__", {}).get("return", "anything")
    has_own = method is not nn.Module.get_extra_state and returned not in (None, "None")
    return ExtraState(name, module, allows_pickles) if has_own else None


def is_pickle(data: bytes) -> bool:
    """Returns whether `pickle.load` or `torch.load` would read these bytes as objects."""
    if data.startswith(BEGINNINGS):
        return True
    try:
        return any(operation.name == "STOP" for operation, _, _ in pickletools.genops(data))
    except Exception:  # the parser raises many kinds
        return False


def check_cost(states: Mapping[str, ExtraState], every: int, adapts: bool) -> None:
    """Refuses extra states that are pickles, or too slow or too large for every mark.

    Args:
        states: the extra states, by name.
        every: the snapshot interval in steps.
        adapts: whether the interval grows by itself with the cost of a snapshot.

    Raises:
        UnsupportedState: names the module that costs most.
    """
    if not states:
        return
    answers = {name: state.state_dict() for name, state in states.items()}
    for name, answer in answers.items():
        if not states[name].allows_pickles and any(map(is_pickle, _raw(answer))):
            raise states[name].pickled()  # of a kind that marks do not look for
    sizes = {name: len(capsule_format.encode(to_plain(answer))) for name, answer in answers.items()}
    if sum(sizes.values()) > BYTES_MAX:
        name = max(sizes, key=lambda each: sizes[each])
        raise UnsupportedState(
            f"get_extra_state of {len(states)} modules returns {sum(sizes.values())} bytes, {sizes[name]} of them for {name}; "
            f"the limit is {BYTES_MAX}.",
            "keep the large values in buffers of the module",
        )
    # The calls above may have compiled or allocated something; these are like those of each mark.
    seconds = {name: _seconds(state) for name, state in states.items()}
    total, limit = sum(seconds.values()), SECONDS_MAX * every
    if not adapts and total > limit:
        name = max(seconds, key=lambda each: seconds[each])
        raise UnsupportedState(
            f"get_extra_state of {len(states)} modules takes {1000 * total:.0f} ms, {1000 * seconds[name]:.0f} ms of them for "
            f"{name}, at each mark; the limit is {1000 * limit:.0f} ms for every={every}.",
            f"every={math.ceil(total / SECONDS_MAX)}, or every='auto', which makes snapshots rarer",
        )


def cost_at_mark(states: Sequence[ExtraState]) -> ExtraStateCost | None:
    """Returns what the answers since the last call cost together; None if there were none."""
    costs = [state.cost for state in states if state.cost is not None]
    for state in states:
        state.cost = None
    if not costs:
        return None
    seconds, nbytes = sum(cost.seconds for cost in costs), sum(cost.nbytes for cost in costs)
    return ExtraStateCost(seconds, nbytes, max(costs).name)


def _seconds(state: ExtraState) -> float:
    began_s = time.perf_counter()
    state.state_dict()
    return time.perf_counter() - began_s


def _nbytes(answer: Any) -> int:
    """Returns the size of the bytes, arrays and tensors in an answer."""
    if isinstance(answer, (bytes, bytearray)):
        return len(answer)
    if isinstance(answer, (torch.Tensor, np.ndarray)):
        return int(answer.nbytes)
    if isinstance(answer, (dict, list, tuple)):
        return sum(map(_nbytes, answer.values() if isinstance(answer, dict) else answer))
    return 0


def _raw(answer: Any) -> Iterator[bytes]:
    """Yields all raw bytes in an answer: byte strings, arrays and tensors of bytes.

    Tensors on a device are left out, because a look at them would wait for the device. A restore
    gets them on the host.
    """
    if isinstance(answer, (bytes, bytearray)):
        yield bytes(answer)
    elif isinstance(answer, torch.Tensor) and answer.dtype in (torch.uint8, torch.int8) and answer.device.type == "cpu":
        yield answer.numpy().tobytes()
    elif isinstance(answer, np.ndarray) and answer.dtype.itemsize == 1:
        yield answer.tobytes()
    elif isinstance(answer, dict):
        for each in answer.values():
            yield from _raw(each)
    elif isinstance(answer, (list, tuple)):
        for each in answer:
            yield from _raw(each)
