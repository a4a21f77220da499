"""Rules for host state when the job has another number of ranks than the snapshot.

    state on all old ranks      new rank r gets
    equal                       the common value
    random generators, differ   those of old rank r; a new rank beyond the old ones gets
                                seeds derived from old rank r mod old world
    optimizer param groups      for each group, the settings of the old groups with its
                                parameters; these settings must agree
    modules                     nothing: all their state is in leaves. So ranks may have other
                                pipeline stages than the old ranks
    extra state of a module     that of the old ranks with the module, if they agree
    state= objects with         the list of all old ranks' states, in rank order
      load_state_dicts          (only if the number of ranks changed)
    … differ, as many ranks     the state of old rank r
    … differ, other ranks       nothing: refused, by name

All values here are trees of plain values (reft.wire.capsule_format). This module loads nothing.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from reft.client.state.extra_state import EXTRA_STATE
from reft.client.state.host_state import HostState
from reft.client.state.serialization import OPTIMIZER_KEYS, to_plain
from reft.core.text import every
from reft.errors import LayoutChanged
from reft.wire import capsule_format

Tree = dict[str, Any]
# The parts of a tree whose entries are compared one by one.
ITEMS = ("subjects", "scalers", "state")
SEED_BITS = 63


def parts(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parts of a capsule's tree that are mapped separately, by name."""
    tree_parts: dict[str, Any] = {"random": tree["random"]}
    for item in ITEMS:
        tree_parts |= {f"{item}.{name}": value for name, value in tree[item].items()}
    return tree_parts


def digest(value: Any) -> str:
    """Returns a digest that is equal for equal values on all ranks."""
    return xxhash.xxh3_128_hexdigest(capsule_format.encode(value))


def parent(rank: int, old_world: int) -> int:
    """Returns the old rank whose random generators a new rank continues."""
    return rank if rank < old_world else rank % old_world


@dataclass
class HostStateResharding:
    """Chooses the host state of one new rank.

    Args:
        rank: the new rank.
        world: the number of new ranks.
        digests: for each old rank: part → digest.
        values: digest → part. May lack generators that this rank does not continue.
        live: this rank's own groups and generators before the restore, as in a tree.
        generators: names of state= objects that are torch generators.
        takes_all: names of state= objects with `load_state_dicts`.
        extra_states: names of the extra state of this rank's modules.

    Attributes:
        lists: name → the states of all old ranks, for objects with `load_state_dicts`.
        lines: messages for the user, the same on all ranks.
    """

    rank: int
    world: int
    digests: Sequence[Mapping[str, str]]
    values: Mapping[str, Any]
    live: Mapping[str, Any]
    generators: Collection[str]
    takes_all: Collection[str]
    extra_states: Collection[str]
    lists: dict[str, list[Any]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        rank: int,
        world: int,
        digests: Sequence[Mapping[str, str]],
        values: Mapping[str, Any],
        host: HostState,
    ) -> HostStateResharding:
        """Returns the rules for the host state of a new rank.

        It asks none of the user's objects for its state.
        """
        objects = host.objects
        return cls(
            rank,
            world,
            digests,
            values,
            live=host.live_settings(),
            generators=[name for name, value in objects.items() if isinstance(value, torch.Generator)],
            takes_all=[name for name, value in objects.items() if hasattr(value, "load_state_dicts")],
            extra_states=[name for name in objects if name.endswith(EXTRA_STATE)],
        )

    def tree(self, step: int, marked: bool) -> Tree:
        """Returns the tree to restore.

        Args:
            step: the step of the snapshot.
            marked: whether a mark of the loop took the snapshot.

        Raises:
            LayoutChanged: no rule maps the state to this rank; other ranks may have other objects.
        """
        names = {item: [p.partition(".")[2] for p in self.digests[0] if p.startswith(f"{item}.")] for item in ITEMS}
        tree: Tree = {"step": step, "marked": marked, "random": self._random()}
        tree["subjects"] = self._tracked_objects()
        tree["scalers"] = {name: self._shared(f"scalers.{name}") for name in names["scalers"]}
        tree["state"] = {name: self._state(name) for name in names["state"] if not name.endswith(EXTRA_STATE)}
        # Each pipeline stage has modules of its own.
        tree["state"] |= {name: self._extra_state(f"state.{name}") for name in self.extra_states}
        return tree

    @property
    def _old_world(self) -> int:
        return len(self.digests)

    def _of(self, rank: int, part: str) -> Any:
        return self.values[self.digests[rank][part]]

    def _is_shared(self, part: str) -> bool:
        return len({each.get(part) for each in self.digests}) == 1

    def _shared(self, part: str) -> Any:
        """Returns the common value of all old ranks.

        If they differ and the number of ranks is the same, returns the value of the old rank with
        this rank's number.
        """
        if self._is_shared(part):
            return self._of(0, part)
        if self.world == self._old_world and all(part in each for each in self.digests):
            return self._of(self.rank, part)
        raise LayoutChanged(
            f"{part} differs among the {self._old_world} ranks of the snapshot, and this job has {self.world} ranks: "
            "no rule says which rank gets which value.",
            "give the object a method load_state_dicts(states), which gets the list of all old ranks' states"
            if part.startswith("state.")
            else f"start {self._old_world} ranks",
        )

    # Generators

    def _random(self) -> Any:
        if self._is_shared("random") or self.rank < self._old_world:
            generators = self._of(parent(self.rank, self._old_world), "random")
        else:
            generators = seeded(self._seed("random"), len(self.live["random"]["cuda"]))
        if not self._is_shared("random") and self.world > self._old_world:
            new_ranks = (
                f"{self._old_world}-{self.world - 1}" if self.world - self._old_world > 1 else f"{self.world - 1}"
            )
            self.lines.append(f"new ranks {new_ranks}: random generators start from seeds derived from the old ranks'.")
        return generators

    def _seed(self, part: str) -> int:
        """Returns a seed, the same at each restore of the same version."""
        text = f"{self.digests[parent(self.rank, self._old_world)][part]} {self.rank}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> (64 - SEED_BITS)

    # The user's objects

    def _state(self, name: str) -> Any:
        part = f"state.{name}"
        is_new_world = self.world != self._old_world
        if name in self.generators and not self._is_shared(part):
            if self.rank < self._old_world:
                return self._of(self.rank, part)
            return to_plain(torch.Generator().manual_seed(self._seed(part)).get_state())
        if name in self.takes_all and is_new_world:
            self.lines.append(f"state[{name!r}] gets the states of {every(self._old_world, 'old rank')}.")
            self.lists[name] = [self._of(old, part) for old in range(self._old_world)]
            return None
        value = self._shared(part)
        if is_new_world and self._is_shared(part):
            self.lines.append(
                f"state[{name!r}] was the same on {every(self._old_world, 'old rank')}: every rank gets this state."
            )
        return value

    # Models and optimizers

    def _extra_state(self, part: str) -> Any:
        """Returns the extra state of a module, which perhaps only some old ranks had."""
        digests = {each[part] for each in self.digests if part in each}
        if not digests:
            raise LayoutChanged(f"no old rank held {part}.", "start the job with the stages of the snapshot")
        return self.values[digests.pop()] if len(digests) == 1 else self._shared(part)

    def _tracked_objects(self) -> Tree:
        """Returns the small state of this rank's tracked objects.

        Old and new ranks may have other modules: those of their pipeline stages. Modules have no
        small state. Objects that have some must be on both sides.
        """
        saved = {part.partition(".")[2]: each for ranks in self.digests for part, each in ranks.items()
                 if part.startswith("subjects.")}  # fmt: skip
        live = self.live["subjects"]
        without = {prefix for prefix, value in live.items() if not value and prefix not in saved}
        unmatched = live.keys() - saved.keys() - without
        unmatched |= {prefix for prefix in saved.keys() - live.keys() if self.values[saved[prefix]]}
        if unmatched:
            raise LayoutChanged(
                f"the snapshot has the objects {sorted(saved)}; attach was given {sorted(live)}. {min(unmatched)} has settings, "
                "and is on one side only."
            )
        return {prefix: {} if prefix in without else self._tracked_object(prefix) for prefix in live}

    def _tracked_object(self, prefix: str) -> Any:
        """Returns the small state of a tracked object, which some old rank had.

        An optimizer gets, for each of its groups, the settings of the old groups with its
        parameters.
        """
        part = f"subjects.{prefix}"
        live = self.live["subjects"][prefix]
        saved_states = [
            self.values[each] for each in dict.fromkeys(ranks[part] for ranks in self.digests if part in ranks)
        ]
        if len(saved_states) == 1 and not saved_states[0]:
            return saved_states[0]  # a module, perhaps of a stage that not all old ranks had
        if any(saved.keys() != OPTIMIZER_KEYS for saved in (live, *saved_states)):
            return self._shared(part)
        scalars: dict[str, Any] = {}
        for saved in saved_states:
            for name, values in saved["scalars"].items():
                if digest(scalars.setdefault(name, values)) != digest(values):
                    raise LayoutChanged(f"{prefix}: the old ranks have different numbers for {name}.")
        groups = [
            {"params": group["params"], "values": self._group(f"{prefix}, group {g}", g, group["params"], saved_states)}
            for g, group in enumerate(live["groups"])
        ]
        return {"class": saved_states[0]["class"], "groups": groups, "scalars": scalars}

    def _group(self, label: str, g: int, names: Collection[str], saved_states: Sequence[Any]) -> Any:
        wanted = set(names)
        settings: dict[str, Any] = {}
        covered: set[str] = set()
        for saved in saved_states:
            for k, group in enumerate(saved["groups"]):
                common = wanted.intersection(group["params"])
                if common or (not wanted and k == g):
                    settings[digest(group["values"])] = group["values"]
                    covered |= common
        if len(settings) == 1 and covered == wanted:
            return next(iter(settings.values()))
        reason = (
            f"the old groups of its {len(wanted)} parameters have different settings"
            if len(settings) > 1
            else f"{len(wanted - covered)} of its parameters were in no group, e.g. {min(wanted - covered, default='')}"
        )
        raise LayoutChanged(f"{label}: {reason}.", "pass the same groups as in the snapshot")


def seeded(seed: int, devices: int) -> dict[str, Any]:
    """Returns the state of every generator after seeding, as `host_state.capture_random` does."""
    kind, keys, gauss = random.Random(seed).getstate()
    return {
        "python": [kind, np.array(keys, np.uint32), gauss],
        "numpy": list(np.random.RandomState(seed & 0xFFFFFFFF).get_state()),
        "cpu": to_plain(torch.Generator().manual_seed(seed).get_state()),
        "cuda": [to_plain(torch.Generator(f"cuda:{i}").manual_seed(seed).get_state()) for i in range(devices)],
    }
