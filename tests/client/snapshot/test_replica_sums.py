"""Sums of replicas' bytes: the same on a host and a device, and different for different bytes."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from reft.client.snapshot import replica_sums
from reft.client.snapshot.replica_sums import (
    PIECE_BYTES,
    ROW_BYTES,
    ROW_WORDS,
    copy_sums,
    pieces_of,
    sums_bytes,
    sums_of,
    tensor_sums,
)
from reft.client.state.tensors import flat_bytes

SIZES = [0, 1, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 9, 3 * PIECE_BYTES + 5 * ROW_BYTES + 77]


def random_bytes(nbytes: int, at: int = 0) -> torch.Tensor:
    """Returns bytes that begin `at` bytes behind a multiple of a word."""
    generator = torch.Generator().manual_seed(nbytes)
    memory = torch.empty(nbytes + at, dtype=torch.uint8)
    memory[at:] = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return memory[at:]


def device_sums(data: torch.Tensor) -> list[int]:
    """Returns the sums as a device computes them, with the CPU as the device."""
    sums = torch.full((sums_bytes(data.nbytes),), 0xA5, dtype=torch.uint8)
    copy_sums(data, sums)
    return sums.tolist()


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_host_and_a_device_compute_the_same_sums(nbytes, at, monkeypatch):
    monkeypatch.setattr(replica_sums, "STAGED_BYTES", 2 * ROW_BYTES)  # several stagings for the larger sizes
    data = random_bytes(nbytes, at)
    sums = sums_of(data.numpy())
    assert sums.nbytes == sums_bytes(nbytes)
    assert device_sums(data) == sums.tolist() == tensor_sums(data).tolist() == device_sums(random_bytes(nbytes))


def test_sums_are_those_of_rows_and_columns_modulo_two_to_the_64():
    words = np.random.default_rng(1).integers(0, 1 << 64, (5, ROW_WORDS), dtype=np.uint64)
    exact = words.astype(object)
    wanted = [value % (1 << 64) for value in (*exact.sum(axis=1), *exact.sum(axis=0))]
    data = np.concatenate([words.view(np.uint8).ravel(), np.arange(3, dtype=np.uint8)])
    assert sums_of(data)[:-3].view(np.uint64).tolist() == wanted and sums_of(data)[-3:].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("one", "other"), [((0, 0), (0, 1)), ((0, 0), (1, 0)), ((2, 5), (140, 1000)), ((139, 7), (140, 7))]
)
def test_sums_see_a_changed_word_and_two_exchanged_words(one, other):
    words = np.random.default_rng(2).integers(0, 1 << 64, (141, ROW_WORDS), dtype=np.uint64)
    changed, exchanged = words.copy(), words.copy()
    changed[other] ^= np.uint64(1 << 63)
    exchanged[one], exchanged[other] = words[other], words[one]
    results = {sums_of(each.view(np.uint8).ravel()).tobytes() for each in (words, changed, exchanged)}
    assert len(results) == 3


def test_sums_do_not_see_four_words_that_cancel_out_in_rows_and_columns():
    """The limit that the module names."""
    words = np.zeros((2, ROW_WORDS), np.uint64)
    one, other = words.copy(), words.copy()
    one[0, 3] = one[1, 8] = other[0, 8] = other[1, 3] = 1
    assert sums_of(one.view(np.uint8).ravel()).tobytes() == sums_of(other.view(np.uint8).ravel()).tobytes()


@pytest.mark.parametrize("shape", [(40, 7000), (3, 600_000), (2, 3, 300_000)])
def test_a_tensor_with_gaps_has_the_sums_of_its_elements_in_row_major_order(shape):
    gapped = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    turned = gapped.transpose(0, 1)
    for tensor in (gapped, turned):
        assert tensor_sums(tensor).tolist() == tensor_sums(tensor.contiguous()).tolist()
        assert max(piece.nbytes for piece in pieces_of(tensor, PIECE_BYTES)) <= PIECE_BYTES


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.complex128])
def test_a_tensor_with_gaps_may_have_any_type(dtype):
    tensor = torch.randint(0, 2, (90, 700)).to(dtype)[:, ::3]
    assert tensor_sums(tensor).tolist() == tensor_sums(tensor.contiguous()).tolist()


@pytest.mark.parametrize(("rows", "columns"), [(600, 700), (30, 70)])
def test_parts_without_gaps_of_a_tensor_with_gaps_are_read_in_row_major_order_too(rows, columns):
    tensor = torch.randn(400_000 // rows // columns + 2, 2, rows, columns)[:, 0].transpose(1, 2)
    assert tensor_sums(tensor).tolist() == tensor_sums(tensor.contiguous()).tolist()


def test_sums_of_a_large_tensor_need_no_copy_of_it():
    tensor = torch.zeros(64 << 18)
    tracemalloc.start()
    tensor_sums(tensor)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < tensor.nbytes / 64


def test_a_tensor_in_another_order_has_sums_of_its_memory():
    tensor = torch.randn(700, 50).t()
    assert tensor_sums(tensor).tolist() == sums_of(flat_bytes(tensor).numpy()).tolist()
