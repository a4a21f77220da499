"""A small Llama-style model in plain torch.

It has RMSNorm, RoPE, SwiGLU, causal attention, tied embedding and dropout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class ModelShape:
    """The sizes of the model; a token is a byte."""

    vocabulary: int = 256
    context: int = 64
    width: int = 96
    heads: int = 4
    layers: int = 2
    dropout: float = 0.1


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            rotate(q, rotation), rotate(k, rotation), v, dropout_p=dropout, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    """A feed-forward layer with SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        hidden = shape.width * 8 // 3
        self.gate = nn.Linear(shape.width, hidden, bias=False)
        self.up = nn.Linear(shape.width, hidden, bias=False)
        self.down = nn.Linear(hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class TransformerBlock(nn.Module):
    """One layer: attention and feed-forward, each after a norm and with a residual connection."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x), rotation))
        return x + self.dropout(self.feed_forward(self.norm_2(x)))


class Llama(nn.Module):
    """The model: returns the loss of predicting each next byte."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(TransformerBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        # A constant, not state. DDP would send a buffer to all ranks at every step.
        self.rotation = rotations(shape.context, shape.width // shape.heads)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x, self.rotation)
        logits = self.norm(x) @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rotations(length: int, width: int) -> torch.Tensor:
    """Returns cosine and sine of the angles of every position: shape (2, length, width / 2)."""
    angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, width, 2) / width))
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotates each pair of features by the angle of its position."""
    cos, sin = rotation[:, : x.shape[-2]]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
