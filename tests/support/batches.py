"""Batches for scripts that trainers run."""

import torch


class Batches:
    """Endless batches that continue after a restart, by state_dict and load_state_dict."""

    def __init__(self, size, seed=0):
        self.size, self.generator = size, torch.Generator().manual_seed(seed)

    def next(self):
        x = torch.randn(self.size, 16, generator=self.generator)
        return x, x.sum(1, keepdim=True).sin()

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
