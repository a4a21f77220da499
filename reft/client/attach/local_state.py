"""The state of this rank before a restore, and memory for what a restore creates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from reft.client.attach.arguments import AttachArguments
from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.restore.materialize import missing_state_buffer
from reft.client.state.extra_state import check_cost
from reft.client.state.host_state import HostState
from reft.client.state.tensors import TensorIndex
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.layout import symbolic
from reft.core.layout.layout import Layout, Leaf, pack
from reft.wire import messages
from reft.wire.capsule_format import NameTable


@dataclass(frozen=True)
class LocalState:
    """The state of this rank, as it is before a restore.

    Attributes:
        tracked: the objects that hold tensors.
        host: host state.
        tensor_index: where each tensor was found.
        leaves: the leaves that exist, and those that the first step will create.
    """

    tracked: TrackedObjects
    host: HostState
    tensor_index: TensorIndex
    leaves: Sequence[Leaf]

    @classmethod
    def of(cls, tracked: TrackedObjects, request: AttachArguments, allows_pickles: bool = False) -> LocalState:
        """Returns the state of these objects.

        Raises:
            UnsupportedState: reft can't hold a part of the state.
        """
        extra_states = tracked.extra_states(allows_pickles)
        check_cost(extra_states, request.every, request.adapts)
        tensor_index = tracked.bind()
        host = HostState(tracked, {**request.objects(), **extra_states}, names=tensor_index.names)
        return cls(tracked, host, tensor_index, [*tensor_index.leaves(), *tracked.predict(tensor_index.names)])

    @cached_property
    def names(self) -> NameTable:
        """The names of this rank's leaves, as the manifest has them."""
        return NameTable(tuple(leaf.name for leaf in self.leaves))

    @cached_property
    def predicted(self) -> Layout:
        """The layout of all leaves."""
        return pack(self.leaves)

    @cached_property
    def symbolic(self) -> symbolic.SymbolicLayout:
        """The layout without the facts that differ by rank."""
        return symbolic.symbolic_form(self.leaves)

    @cached_property
    def table(self) -> bytes:
        """The table of the layout, as slots have it."""
        return messages.table_to(self.predicted)

    @cached_property
    def device(self) -> torch.device:
        """The device of this rank's state: the CUDA device of any parameter, else the CPU."""
        devices = (named.local.device for named in self.tensor_index.names.values())
        return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


class RestoreMemory:
    """Memory for the state to restore; its pages are made in the background.

    Attributes:
        buffer: the memory; empty until a restore is likely.
    """

    def __init__(self) -> None:
        self.buffer = HugePageBuffer(0)

    def make(self, state: LocalState) -> None:
        """Starts to make memory for the leaves that do not exist."""
        self.buffer = missing_state_buffer(state.predicted.leaves, state.tensor_index)

    def close(self) -> None:
        """Frees the memory that no tensor uses."""
        self.buffer.close()
        self.buffer = HugePageBuffer(0)
