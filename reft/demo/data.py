"""Python's own manual as training text, and a loader that can save its position."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def manual() -> torch.Tensor:
    """Returns every topic of Python's help texts as bytes: about 465 kB, part of every Python."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


class Loader:
    """Batches of text, different for each rank. Fetch the next batch inside the training loop.

    Args:
        text: all bytes.
        batch: sequences in a batch.
        context: bytes in a sequence.
        rank, world: which part of the text is read.
        seed: of the order in which passages are read.
    """

    def __init__(self, text: torch.Tensor, batch: int, context: int, rank: int, world: int, seed: int) -> None:
        self._text, self._batch, self._context = text, batch, context
        self._rank, self._world, self._seed = rank, world, seed
        self._passages = (len(text) - 1) // context
        self._batches = self._passages // (batch * world)  # batches of one rank in an epoch
        self._epoch = self._position = 0
        self._order = self._shuffled()

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the next batch: inputs and targets, each of shape (batch, context)."""
        if self._position == self._batches:
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffled()
        first = (self._position * self._world + self._rank) * self._batch
        self._position += 1
        starts = self._order[first : first + self._batch, None] * self._context
        index = starts + torch.arange(self._context)
        return self._text[index], self._text[index + 1]

    def state_dict(self) -> dict[str, int]:
        """Returns the position of the loader."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Moves the loader to the position in `state`."""
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._shuffled()

    def _shuffled(self) -> torch.Tensor:
        # A separate generator, so that the dropout of the model does not depend on the data.
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        return torch.randperm(self._passages, generator=generator)
