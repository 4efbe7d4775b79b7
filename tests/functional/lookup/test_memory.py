"""Memory of the backward pass: one (V, D) buffer is alive at a time, where two dense ends have two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from bowline.functional.tied_lookup import tied_embedding
from tests.functional.lookup.ends import head, matrix

SIZE, WIDTH = 20_000, 32


class Peak(TorchDispatchMode):
    """The most bytes of memory made inside that were alive at once, after any operation.

    By weak references to tensors: what asks for a tensor's storage counts as an owner of it from then on.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[TensorWeakRef] = []
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        new = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor) and one.data_ptr() not in given]
        self.made = [one for one in self.made if one() is not None] + [TensorWeakRef(one) for one in new]
        alive = {one.data_ptr(): one.nbytes for one in (reference() for reference in self.made) if one is not None}
        self.bytes = max(self.bytes, sum(alive.values()))
        return result


def buffers(weight: torch.Tensor, loss: torch.Tensor) -> float:
    """The peak of the backward pass in (V, D) buffers."""
    with Peak() as peak:
        loss.backward()
    return float(peak.bytes) / (weight.numel() * weight.element_size())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_pass_has_one_buffer_of_the_matrix_and_not_two(dtype: torch.dtype) -> None:
    def run(lookup: Any) -> float:
        weight, ids = matrix(dtype, size=SIZE, width=WIDTH), torch.arange(40) * 7 % 23
        rows = lookup(ids, weight).tanh()[:1]  # logits (1, V) are a 32nd of a buffer
        return buffers(weight, head(rows, weight).square().sum())

    assert 1 <= run(tied_embedding) < 1.2
    assert run(F.embedding) >= 2


@pytest.mark.parametrize("lookups", [2, 3])
def test_lookups_without_a_head_have_one_buffer_too(lookups: int) -> None:
    def run(lookup: Any) -> float:
        weight, ids = matrix(size=SIZE, width=WIDTH), torch.arange(40)
        rows = torch.cat([lookup(ids + shift, weight) for shift in range(lookups)])
        return buffers(weight, rows.square().sum())

    assert 1 <= run(tied_embedding) < 1.2
    assert run(F.embedding) >= 2
