"""Who gets which of the small host states, where the new job has other ranks than the old one had: rules, and no guesses.

    on all old ranks            new rank r gets
    the same                    that
    random generators, unlike   those of old rank r; a rank beyond the old ones: seeds that follow from old rank r mod old world
    param groups of optimizers  by parameter: what the old groups that had r's parameters say, which must be one thing
    state= objects with         the list of all old ranks' states, in their order (not if every rank has its own again)
      load_state_dicts
    … unlike, as many ranks     that of old rank r
    … unlike, other ranks       refused, by name

Everything here is trees of plain values (reft.wire.capsule_format); nothing is loaded.
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

from reft.client.state.serialization import OPTIMIZER_KEYS, to_plain
from reft.core.text import every
from reft.errors import LayoutChanged
from reft.wire import capsule_format

Tree = dict[str, Any]
ITEMS = ("subjects", "scalers", "state")  # parts of a tree, each with parts that are compared one by one
SEED_BITS = 63


def parts(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a capsule's tree that are mapped on their own, by name."""
    found: dict[str, Any] = {"random": tree["random"]}
    for item in ITEMS:
        found |= {f"{item}.{name}": value for name, value in tree[item].items()}
    return found


def digest(value: Any) -> str:
    """Equal for equal values, whoever has them."""
    return xxhash.xxh3_128_hexdigest(capsule_format.encode(value))


def parent(rank: int, old_world: int) -> int:
    """The old rank whose generators a new rank goes on with."""
    return rank if rank < old_world else rank % old_world


@dataclass
class HostStateResharding:
    """What one new rank gets.

    Args:
        rank: the new one.
        world: how many there are.
        digests: for each old rank, part → digest of it.
        values: digest → the part; all but those of generators that this rank does not go on with.
        live: this rank's own tree as it is before anything is brought back.
        generators: names of state= objects that are torch generators.
        takes_all: names of state= objects with `load_state_dicts`.

    Attributes:
        lists: name → all old ranks' states, for objects that are to be given them.
        lines: what a person should know of it, the same on all ranks.
    """

    rank: int
    world: int
    digests: Sequence[Mapping[str, str]]
    values: Mapping[str, Any]
    live: Mapping[str, Any]
    generators: Collection[str]
    takes_all: Collection[str]
    lists: dict[str, list[Any]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def tree(self, step: int, marked: bool) -> Tree:
        """The tree to restore.

        Raises:
            LayoutChanged: what is held can't be given to these ranks; the same on all.
        """
        names = {item: [p.partition(".")[2] for p in self.digests[0] if p.startswith(f"{item}.")] for item in ITEMS}
        found: Tree = {"step": step, "marked": marked, "random": self._random()}
        found["subjects"] = {prefix: self._subject(prefix) for prefix in names["subjects"]}
        found["scalers"] = {name: self._shared(f"scalers.{name}") for name in names["scalers"]}
        found["state"] = {name: self._state(name) for name in names["state"]}
        return found

    @property
    def _old_world(self) -> int:
        return len(self.digests)

    def _of(self, rank: int, part: str) -> Any:
        return self.values[self.digests[rank][part]]

    def _is_shared(self, part: str) -> bool:
        return len({each.get(part) for each in self.digests}) == 1

    def _shared(self, part: str) -> Any:
        """What all old ranks had alike, or, if each rank has its own again, this rank's."""
        if self._is_shared(part):
            return self._of(0, part)
        if self.world == self._old_world and all(part in each for each in self.digests):
            return self._of(self.rank, part)
        raise LayoutChanged(
            f"{part} differs among the {self._old_world} ranks that are held, and there are {self.world} now: "
            "nobody can say whose each should have.",
            "give the object a method load_state_dicts(states), which gets the list of all old ranks' states"
            if part.startswith("state.")
            else f"start {self._old_world} ranks",
        )

    # Generators

    def _random(self) -> Any:
        if self._is_shared("random") or self.rank < self._old_world:
            found = self._of(parent(self.rank, self._old_world), "random")
        else:
            found = seeded(self._seed("random"), len(self.live["random"]["cuda"]))
        if not self._is_shared("random") and self.world > self._old_world:
            new = f"{self._old_world}-{self.world - 1}" if self.world - self._old_world > 1 else f"{self.world - 1}"
            self.lines.append(f"new ranks {new}: random generators start from seeds that follow from the old ranks'.")
        return found

    def _seed(self, part: str) -> int:
        """The same at each restore of the same version."""
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
            self.lines.append(f"state[{name!r}] was given the states of {every(self._old_world, 'old rank')}.")
            self.lists[name] = [self._of(old, part) for old in range(self._old_world)]
            return None
        found = self._shared(part)
        if is_new_world and self._is_shared(part):
            self.lines.append(
                f"state[{name!r}] was the same on {every(self._old_world, 'old rank')}: every rank has it now."
            )
        return found

    # Models and optimizers

    def _subject(self, prefix: str) -> Any:
        """What an extractor gave; of an optimizer's groups, what the old groups of this rank's parameters say."""
        part = f"subjects.{prefix}"
        live = self.live["subjects"].get(prefix)
        helds = [self.values[each] for each in dict.fromkeys(ranks[part] for ranks in self.digests if part in ranks)]
        if live is None or any(held.keys() != OPTIMIZER_KEYS for held in (live, *helds)):
            return self._shared(part)
        scalars: dict[str, Any] = {}
        for held in helds:
            for name, values in held["scalars"].items():
                if digest(scalars.setdefault(name, values)) != digest(values):
                    raise LayoutChanged(f"{prefix}: ranks held unlike numbers for {name}.")
        groups = [
            {"params": group["params"], "values": self._group(f"{prefix}, group {g}", g, group["params"], helds)}
            for g, group in enumerate(live["groups"])
        ]
        return {"class": helds[0]["class"], "groups": groups, "scalars": scalars}

    def _group(self, what: str, g: int, names: Collection[str], helds: Sequence[Any]) -> Any:
        wanted = set(names)
        found: dict[str, Any] = {}
        seen: set[str] = set()
        for held in helds:
            for k, group in enumerate(held["groups"]):
                own = wanted.intersection(group["params"])
                if own or (not wanted and k == g):
                    found[digest(group["values"])] = group["values"]
                    seen |= own
        if len(found) == 1 and seen == wanted:
            return next(iter(found.values()))
        why = (
            f"the old groups that held its {len(wanted)} parameters have unlike settings"
            if len(found) > 1
            else f"{len(wanted - seen)} of its parameters were in no group, e.g. {min(wanted - seen, default='')}"
        )
        raise LayoutChanged(f"{what}: {why}.", "pass the groups as they were")


def seeded(seed: int, devices: int) -> dict[str, Any]:
    """The state of every generator after it was seeded; as `host_state.capture_random` gives it."""
    kind, keys, gauss = random.Random(seed).getstate()
    return {
        "python": [kind, np.array(keys, np.uint32), gauss],
        "numpy": list(np.random.RandomState(seed & 0xFFFFFFFF).get_state()),
        "cpu": to_plain(torch.Generator().manual_seed(seed).get_state()),
        "cuda": [to_plain(torch.Generator(f"cuda:{i}").manual_seed(seed).get_state()) for i in range(devices)],
    }
