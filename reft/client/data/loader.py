"""A data loader that goes on after a restart: same epoch, next batch, same order, same draws.

    epochs ─► epoch e ─► pass over the loader ─► batch 0, batch 1, …, the last one
                              position: (e, batches that were handed out)

The position counts what the loop was given. Batches that workers have made ahead do not count, so
they are made again after a restart, and none is lost or handed out twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from reft.client.data.iterable import IterableSource
from reft.client.data.map_style import MapSource
from reft.client.data.prepared import PreparedLoader
from reft.client.data.reading import ReadingFacts, check_same, moved, reading_of
from reft.client.data.sources import EpochSource
from reft.client.data.stateful import StatefulSource
from reft.client.state.restored_generators import RestoredGenerators
from reft.console import say
from reft.errors import ConfigError

NOT_IN_STATE = (
    "the position of this ResumableLoader, which no reft.attach was given: pass it there before its first batch, "
    'state={"data": loader}'
)


class ResumableLoader:
    """A data loader whose position belongs to the training state.

        loader = reft.ResumableLoader(DataLoader(dataset, batch_size=32, shuffle=True))
        session = reft.attach(model, optimizer, state={"data": loader})
        for epoch in loader.epochs(10):  # the epochs that are left; the first is 0
            for x, y in loader:  # the batches that are left in this epoch
                ...
                session.step_end()
            validate()

    Where the loop counts steps, `batches = loader.endless()` gives one epoch after the other:

        for step in session.steps(1000):
            x, y = next(batches)

    After the last batch of an epoch the pass ends, what follows in the body runs again, and the
    next epoch begins. To leave a pass early, decide by `loader.batch`, which a restart knows, at
    the top of the body. At its end, a restart from just that mark would miss the test:

        for x, y in loader:
            if loader.batch > 5:  # batches 1 to 5 are trained on; this one is not
                break

    The order of an epoch follows from (seed, epoch), and what is drawn for a batch from (seed,
    epoch, batch); where a sampler divides the data among ranks, its rank counts, too. Workers and
    prefetching change nothing of it. An iterable dataset is read again up to its place. Other
    attributes are those of the loader below.

    Args:
        loader: a torch DataLoader, one that Accelerate has prepared, or torchdata's
            StatefulDataLoader. Use this object in place of it.
        seed: of orders and draws. Give each rank a seed of its own if the ranks read the same data
            and are to draw different numbers.

    Raises:
        ConfigError: the position of this loader can't be held.
    """

    def __init__(self, loader: Any, *, seed: int = 0) -> None:
        if not isinstance(seed, int) or seed < 0:
            raise ConfigError(f"seed is {seed!r}; it is a whole number, 0 or more.", "seed=0")
        self._loader = loader
        self._source = source_of(loader, seed)
        self.epoch = 0
        self.batch = 0
        self._entered: int | None = None  # in an epoch: the number of its first batch in this process
        self._end = 0  # of the epochs that the loop asks for
        self._is_untouched = False  # a position was loaded, and no batch was handed out since
        self._newest_pass: object = None
        self._restored: RestoredGenerators | None = None
        self._on_batch: Callable[[], None] | None = None
        self._lines: list[str] | None = self._source.not_held()  # None once they are said
        self._is_held = False  # something has asked for the position, as attach does

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)  # not made yet
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def epochs(self, end: int) -> Iterator[int]:
        """Yields the numbers of the epochs that are left before epoch `end`.

        After a restore this says so if no batch is left.
        """
        self._end = end
        if self.epoch >= end:
            self._say_all_done()
        while self.epoch < end:
            self._entered = self.batch
            try:
                yield self.epoch
            finally:
                self._entered = None
            self.epoch, self.batch = self.epoch + 1, 0

    def endless(self) -> Iterator[Any]:
        """Yields the batches of one epoch after the other. Ends if an epoch has no batch."""
        for _ in self.epochs(2**63):
            yield from self._remaining()
            if not self.batch:
                return

    def __iter__(self) -> Iterator[Any]:
        """Returns the batches that are left in this epoch.

        Raises:
            ConfigError: this epoch has been passed over before.
        """
        return self._remaining()

    def _remaining(self) -> Iterator[Any]:
        if self._entered is None:
            return self._look()
        if self.batch > self._entered + 1:
            raise ConfigError(
                f"epoch {self.epoch} was passed over up to batch {self.batch}, and can't be begun again in the same body.",
                "make a DataLoader of its own for a second pass, such as one that evaluates",
            )
        self.batch = self._entered
        return self._pass()

    def _pass(self) -> Iterator[Any]:
        self._newest_pass = this = object()
        self._say_what_is_not_held()
        batches = self._source.batches(self.epoch, self.batch)
        if self._restored is not None:
            self._restored.put_back()  # before the next step draws
        for batch in batches:
            if self._newest_pass is not this:
                raise ConfigError("a pass over a ResumableLoader was used after another one began.")
            self.batch += 1
            self._is_untouched = False
            if self._on_batch is not None:
                self._on_batch()
            yield batch
        if self._is_untouched:
            self._at_epoch_end()

    def _at_epoch_end(self) -> None:
        """The restored position is the end of an epoch: what follows the last batch runs again."""
        if self._restored is not None:
            self._restored.end_of_epoch()
        if self.epoch + 1 >= self._end:
            self._say_all_done()
        self._is_untouched = False

    def _say_all_done(self) -> None:
        if self._is_untouched:
            _say(
                f"this job has completed all {self._end} epochs: nothing is left to be trained. To train from epoch 0: "
                "reft-cli purge JOB, or another job name (--rdzv-id, REFT_JOB)."
            )

    def _look(self) -> Iterator[Any]:
        """Yields the next batch without moving on, as for `next(iter(loader))` before training."""
        for number, batch in enumerate(self._source.batches(self.epoch, self.batch)):
            if number:
                raise ConfigError(
                    "a ResumableLoader gives more than one batch only inside of its epochs.",
                    "for epoch in loader.epochs(10): for batch in loader: …, or batches = loader.endless()",
                )
            yield batch

    def _say_what_is_not_held(self) -> None:
        lines, self._lines = self._lines, None
        if lines is not None and not self._is_held:
            lines = [*lines, NOT_IN_STATE]
        if lines:
            _say(*(f"not covered: {line}." for line in lines))

    # State

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in plain values; the same on all ranks that read alike."""
        self._is_held = True
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "replicas": self._source.replicas,
            "facts": dict(self._source.facts),
            "source": self._source.state(self.epoch, self.batch),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the position of the state: the next batch is the one that follows it.

        Raises:
            LayoutChanged: the state is of another loader.
        """
        self._load(state, [state], is_same_world=True)

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Goes to the same place in the data, from another number of ranks.

        Args:
            states: those of all ranks of that job.

        Raises:
            LayoutChanged: the states are of another loader, or differ.
        """
        self._load(states[0], states, is_same_world=False)

    def restored(self, generators: RestoredGenerators) -> None:
        """Puts these generators back when the next pass begins. `reft.attach` calls this."""
        self._restored = generators

    def watch(self, on_batch: Callable[[], None] | None) -> None:
        """Calls `on_batch` when a batch is handed out, in rehearsals; None ends that."""
        self._on_batch = on_batch

    def _load(self, state: Mapping[str, Any], states: Sequence[Mapping[str, Any]], is_same_world: bool) -> None:
        now = ReadingFacts(self._source.facts, self._source.replicas)
        before = reading_of(states)
        check_same(before, now)
        epoch, batch = state["epoch"], state["batch"]
        line = ""
        if not is_same_world or before.replicas != now.replicas:
            batch, line = moved(epoch, batch, before, now, len(self) if now.is_split_in_turn else None)
        self._source.load(epoch, batch, state["source"])
        self.epoch, self.batch = epoch, batch
        self._newest_pass, self._is_untouched = None, True
        if line:
            _say(line)


def source_of(loader: Any, seed: int) -> EpochSource:
    """Returns the source of a loader's epochs.

    Raises:
        ConfigError: the position of this loader can't be held.
    """
    base = getattr(loader, "base_dataloader", loader)  # Accelerate wraps the loader that it prepares
    if base is not loader and (type(loader).__name__ != "DataLoaderShard" or hasattr(base, "state_dict")):
        raise ConfigError(
            f"the position of a {type(loader).__name__} with {type(base).__name__} can't be held.",
            "DataLoaderConfiguration(dispatch_batches=False, use_stateful_dataloader=False)",
        )
    if not isinstance(base, DataLoader):
        raise ConfigError(
            f"the position of a {type(base).__name__} can't be held: it is no torch DataLoader.",
            "pass a torch DataLoader, or give the object state_dict and load_state_dict and pass it in state=",
        )
    if hasattr(base, "state_dict") and hasattr(base, "load_state_dict"):
        return StatefulSource(base)
    if type(base).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            f"the position of a {type(base).__name__} can't be held: its class has an __iter__ of its own.",
            "pass a torch DataLoader, or give the class state_dict and load_state_dict",
        )
    if isinstance(base.dataset, (IterDataPipe, MapDataPipe)):
        raise ConfigError(
            f"the position of the datapipe {type(base.dataset).__name__} can't be held.",
            "make it a Dataset or an IterableDataset",
        )
    if base.num_workers and not base.in_order:
        raise ConfigError("in_order=False hands out batches in an order that no restart repeats.", "in_order=True")

    def place(rebuilt: DataLoader[Any]) -> Iterable[Any]:
        if base is loader:
            return rebuilt
        loader.base_dataloader = PreparedLoader(base, rebuilt)
        return loader  # type: ignore[no-any-return]

    kind = IterableSource if isinstance(base.dataset, IterableDataset) else MapSource
    return kind(base, seed, place)


def _say(*lines: str) -> None:
    """Writes lines to stderr, on one rank."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        say("\n".join(lines))
