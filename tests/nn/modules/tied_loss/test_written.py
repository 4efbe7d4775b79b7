"""Deferred logits that are written to: whatever shares their memory sees it, as with any tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.functional.deferred import DeferredLogits, Product
from tests.nn.modules.tied_loss.cases import LABELS, V, deferred_of, ends

VIEWS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda x: x[..., :-1, :],
    "tokens": lambda x: x[..., 3:9],
    "first": lambda x: x[:1],
    "view": lambda x: x.view(x.shape),
    "reshape": lambda x: x.reshape(-1, x.size(-1)),
    "contiguous": lambda x: x.contiguous(),
    "same dtype": lambda x: x.to(x.dtype),
    "clone": lambda x: x.clone(),
    "float": lambda x: x.float(),
    "squeeze": lambda x: x[:1].squeeze(0),
    "detach": lambda x: x.detach(),
    "transpose": lambda x: x.transpose(0, -1),
    "one of several": lambda x: x.unbind(0)[-1],
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda x: x.mul_(2.0),
    "fill_": lambda x: x.fill_(3.0),
    "x[...] =": lambda x: x.__setitem__((..., 0), -1.0),
    "+=": lambda x: x.__iadd__(1.0),
    "out=": lambda x: torch.neg(x, out=x),
    "inplace=": lambda x: F.relu(x, inplace=True),
    "several": lambda x: torch._foreach_mul_([x], 0.5),
    "operator": lambda x: torch.ops.aten.mul_.Scalar(x, 1.5),
    "sum": lambda x: x.sum(),  # which looks
}
ACTS = st.tuples(st.integers(0, 9), st.sampled_from([*VIEWS, *WRITES]))


@settings(max_examples=400)
@given(st.lists(ACTS, max_size=8), st.sampled_from([torch.no_grad, torch.inference_mode]))
def test_what_is_written_is_seen_by_whatever_shares_the_memory(acts: Any, mode: Callable[[], Any]) -> None:
    """Views of logits, their views, and copies of them, written to in any order."""
    generator = torch.Generator().manual_seed(0)
    with mode():
        hidden, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((2, 3, 4), (V, 4)))
        reals: list[Any] = [F.linear(hidden, weight)]
        mine: list[Any] = [DeferredLogits(Product(hidden, weight, None, torch.float64, grad=False))]
        for which, name in acts:
            act, at = (VIEWS | WRITES)[name], which % len(reals)
            try:
                real = act(reals[at])
            except (RuntimeError, IndexError):  # not of this shape or layout
                return
            found = act(mine[at])
            if name in VIEWS:
                reals.append(real)
                mine.append(found)
        for one, other in zip(mine, reals, strict=True):
            torch.testing.assert_close(one.sum(-1), other.sum(-1))
            assert one.shape == other.shape


@pytest.mark.parametrize("part", [lambda x: x, lambda x: x[:-1]])
@pytest.mark.parametrize("watched", ["register_hook", "retain_grad", "requires_grad"])
@pytest.mark.parametrize("looked_at", [True, False])
def test_who_watches_a_part_of_them_sees_the_gradient_of_its_loss(part: Any, watched: str, looked_at: bool) -> None:
    found: list[list[Any]] = []
    learns = watched != "requires_grad"
    for deferred in (True, False):
        leaves = [one.detach().requires_grad_(learns) for one in ends()]
        logits = part(deferred_of(*leaves) if deferred else F.linear(*leaves))
        seen: list[torch.Tensor] = []
        if looked_at:
            logits.argmax(-1)
        if watched == "register_hook":
            logits.register_hook(lambda gradient, seen=seen: seen.append(gradient) or 2 * gradient)
        elif watched == "retain_grad":
            logits.retain_grad()
        else:
            logits.requires_grad = True
        F.cross_entropy(logits.reshape(-1, V), LABELS[: len(logits)]).backward()
        found.append([*(seen or [logits.grad]), *(one.grad for one in leaves if learns)])
    assert len(found[0]) == (4 if learns else 1)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("biased", [True, False])
def test_those_that_are_watched_may_be_written_to(biased: bool) -> None:
    """Logits of a head with a bias are a view, and so would be what a Function makes of them."""
    hidden, *head = ends(biased=biased)
    found = []
    for deferred in (True, False):
        leaves = [one.detach().requires_grad_() for one in (hidden[None], *head)]
        logits = deferred_of(*leaves) if deferred else F.linear(*leaves)
        logits.register_hook(lambda gradient: gradient)
        logits.mul_(2)
        logits[..., 3] = 0.0
        found.append(torch.autograd.grad(logits.logsumexp(-1).sum(), leaves))
    torch.testing.assert_close(*found)


def test_a_bias_is_added_as_it_was() -> None:
    hidden, weight = (one.detach() for one in ends(biased=False))
    bias = torch.arange(V, dtype=torch.float64)
    logits = deferred_of(hidden, weight) + bias
    bias.zero_()
    torch.testing.assert_close(logits.sum(), F.linear(hidden, weight).sum() + len(hidden) * V * (V - 1) / 2)


def test_gradients_of_what_was_written_to_are_those_of_logits() -> None:
    mine, plain = ends(), ends()
    for logits, leaves in ((deferred_of(*mine), mine), (F.linear(*plain), plain)):
        some = logits[:-1]
        logits.div_(0.5)
        some[..., 0] = 3.0
        (F.cross_entropy(some, LABELS[:-1]) + logits.square().mean()).backward()
        assert all(one.grad is not None for one in leaves)
    torch.testing.assert_close([one.grad for one in mine], [one.grad for one in plain])
