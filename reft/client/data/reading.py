"""Which position means now what a held position meant to the ranks before.

    the ranks now                 the position after a restart
    as before                     the same batch of the same epoch
    others, DistributedSampler    the batch that the same samples come before; what does not fill a
                                  batch of all ranks is read again
    others, each rank reads all   the same batch
    others, any other sampler     the epoch begins again

Only the first changes nothing of the samples that follow; each of the last two says a line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reft.client.state.serialization import to_plain
from reft.errors import LayoutChanged
from reft.wire import capsule_format

IN_TURN = ("DistributedSampler", "BatchSampler of DistributedSampler")  # rank r reads samples r, r + n, r + 2n, …
OF_TORCH = ("RandomSampler", "SequentialSampler", "SubsetRandomSampler", "WeightedRandomSampler")
ALIKE = {name for sampler in OF_TORCH for name in (sampler, f"BatchSampler of {sampler}")}


@dataclass(frozen=True)
class ReadingFacts:
    """What the meaning of a position depends on.

    Attributes:
        facts: facts about the loader, by name.
        replicas: the number of ranks that divide each epoch among them.
    """

    facts: Mapping[str, Any]
    replicas: int

    @property
    def is_split_in_turn(self) -> bool:
        """Whether each rank reads every n-th sample of one order."""
        return self.facts.get("sampler") in IN_TURN

    @property
    def samples(self) -> int:
        """The samples that all ranks read for one batch, if they are split in turn."""
        return self.replicas * (self.facts["batch_size"] or 1)


def reading_of(states: Sequence[Mapping[str, Any]]) -> ReadingFacts:
    """Returns what the states of all ranks say.

    Raises:
        LayoutChanged: the states are of no ResumableLoader, or differ.
    """
    if any("facts" not in state for state in states):
        raise LayoutChanged("the held position is of no reft.ResumableLoader of this release.", *_START_ANEW)
    if len({capsule_format.encode(to_plain(dict(state))) for state in states}) > 1:
        raise LayoutChanged(
            "the ranks of the snapshot stand at different places in the data, and this job has other ranks.",
            "start as many ranks as before",
        )
    return ReadingFacts(states[0]["facts"], states[0]["replicas"])


def check_same(before: ReadingFacts, now: ReadingFacts) -> None:
    """Compares the facts. With other replicas the batch size may be another one.

    Raises:
        LayoutChanged: the facts differ.
    """
    spared = {"batch_size"} if before.replicas != now.replicas and now.is_split_in_turn else set()
    names = sorted(before.facts.keys() | now.facts.keys())
    differences = [
        f"{name} was {before.facts.get(name)!r} and is {now.facts.get(name)!r}"
        for name in names
        if name not in spared and before.facts.get(name) != now.facts.get(name)
    ]
    if differences:
        raise LayoutChanged(f"the position is one of another loader: {'; '.join(differences)}.", *_START_ANEW)


def moved(epoch: int, batch: int, before: ReadingFacts, now: ReadingFacts, batches: int | None) -> tuple[int, str]:
    """Returns the batch that stands for one of other ranks, and a line about it.

    Args:
        epoch: the epoch, for the line.
        batch: the number of the next batch, as it was.
        before: what the position meant.
        now: what it means to this loader.
        batches: the number of batches of an epoch now, if the samples are split in turn.
    """
    if not batch:
        return 0, ""
    if now.is_split_in_turn and batches is not None:
        read, samples = batch * before.samples, now.samples
        has_ended = read >= now.facts["samples"]
        moved_batch = batches if has_ended else read // samples
        again = 0 if has_ended else read % samples
        line = f"data: epoch {epoch} goes on at batch {moved_batch} of {now.replicas} replicas"
        return moved_batch, f"{line}; it was batch {batch} of {before.replicas}. {again} samples are read again."
    if now.facts.get("sampler") in ALIKE:
        return batch, ""
    return 0, (
        f"data: epoch {epoch} begins again: nothing says which of its samples the ranks before had read up to batch {batch}."
    )


_START_ANEW = ("use the loader of before, or start under another name (REFT_JOB)",)
