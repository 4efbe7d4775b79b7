"""Logits that are not computed until something needs them: what is done to them is what would be done to logits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it
from torch.utils.checkpoint import checkpoint

from bowline.errors import UsageError
from bowline.functional.deferred import DeferredLogits, Product
from tests.nn.modules.tied_loss.cases import LABELS, V, deferred_of, ends

STEPS: dict[str, Callable[[Any], Any]] = {
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float32),
    "to device": lambda x: x.to("cpu"),
    "scale": lambda x: x * 0.5,
    "scale from the left": lambda x: 0.5 * x,
    "divide": lambda x: x / 3.0,
    "cap": lambda x: torch.tanh(x / 2.0) * 2.0,
    "contiguous": lambda x: x.contiguous(),
    "clone": lambda x: x.clone(),
    "view": lambda x: x.view(-1, x.size(-1)),
    "reshape": lambda x: x.reshape(-1, V),
    "view by shape": lambda x: x.view(x.shape),
    "flatten": lambda x: x.flatten(0, -2),
    "rows": lambda x: x[..., :-1, :],
    "first": lambda x: x[:1],
    "tokens": lambda x: x[..., :10],
    "tokens from": lambda x: x[..., 3:],
    "every other token": lambda x: x[..., ::2],
    "one token": lambda x: x[..., 3],
    "softmax": lambda x: x.softmax(-1),
    "negate": lambda x: -x,
    "bias": lambda x: x + torch.arange(V, dtype=x.dtype),
    "detach": lambda x: x.detach(),
    "transpose": lambda x: x.transpose(0, -1),
    "sum": lambda x: x.sum(-1),
}


@settings(max_examples=150)
@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=5), st.booleans())
def test_whatever_is_done_to_them_is_what_would_be_of_the_logits(steps: list[str], biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((2, 3, 4), (V, 4)))
    bias = torch.randn(V, generator=generator, dtype=torch.float64) if biased else None
    real: Any = F.linear(hidden, weight, bias)
    deferred: Any = DeferredLogits(Product(hidden, weight, bias, torch.float64))
    for name in steps:
        try:
            real = STEPS[name](real)
        except (RuntimeError, IndexError):  # not of this shape any more, or not of this layout, which is not kept
            return
        deferred = STEPS[name](deferred)
        assert (tuple(deferred.shape), deferred.dtype, deferred.dim()) == (tuple(real.shape), real.dtype, real.dim())
    torch.testing.assert_close(deferred + 0, real, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.float() / 0.7,
        lambda x: (x.float() / 30).tanh() * 30,
        lambda x: (x * 2).float() * 3,
        lambda x: (x / 2).tanh().float() * 2,
        lambda x: x.double() * 3,
        lambda x: x.half().float() * 3,
        lambda x: x.float() + torch.arange(V) / 7,
        lambda x: x.float() + torch.zeros(V),
        lambda x: x + torch.zeros(V),
    ],
)
def test_what_is_done_after_a_cast_is_done_in_that_dtype(step: Callable[[Any], Any]) -> None:
    hidden, weight = (one.detach().bfloat16() for one in ends(biased=False))
    found, expected = step(deferred_of(hidden, weight)), step(F.linear(hidden, weight))
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.detach().clone() + 0, expected, rtol=1e-6, atol=0.0)


NAMED: list[Callable[[Any], Any]] = [
    lambda x: x.flatten(start_dim=0, end_dim=1),
    lambda x: torch.flatten(x, end_dim=1),
    lambda x: torch.add(x, torch.ones(V, dtype=x.dtype), alpha=-0.5),
    lambda x: x.add(other=torch.ones(V, dtype=x.dtype)),
    lambda x: torch.div(x, 2, rounding_mode="floor"),
    lambda x: x.div(other=2.0),
    lambda x: x.mul(other=2.0),
    lambda x: torch.mul(x, 2, out=torch.empty(2, 3, V, dtype=x.dtype)),
    lambda x: x.float(memory_format=torch.preserve_format),
    lambda x: x[True, :, :, :5],
    lambda x: x + torch.ones(1, 1, 1, V, dtype=x.dtype),
]


@pytest.mark.parametrize("step", NAMED)
def test_arguments_may_have_names_and_be_of_any_kind(step: Callable[[Any], Any]) -> None:
    hidden, weight = ends(biased=False)
    hidden = hidden.detach().view(2, 3, 4)
    found, expected = step(deferred_of(hidden, weight.detach())), step(F.linear(hidden, weight.detach()))
    torch.testing.assert_close(found + 0, expected)
    assert found.shape == expected.shape


@pytest.mark.parametrize("closure", [True, False])
def test_a_checkpoint_saves_them_once(closure: bool) -> None:
    """What it saves in the first pass and in the second have to be the same tensors."""
    mine, plain = ends(), ends()
    for logits in (deferred_of(*mine), F.linear(*plain)):

        def act(given: torch.Tensor, logits: torch.Tensor = logits) -> torch.Tensor:
            return (logits if closure else given).log_softmax(-1).exp()

        checkpoint(act, logits, use_reentrant=False).square().sum().backward()
    torch.testing.assert_close([one.grad for one in mine], [one.grad for one in plain])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_its_cross_entropy_is_torchs(reduction: str, smoothing: float) -> None:
    hidden, weight = torch.randn(6, 4, dtype=torch.float64), torch.randn(V, 4, dtype=torch.float64)
    labels = torch.tensor([1, 2, -100, 4, 5, 49])
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    deferred = DeferredLogits(Product(hidden, weight, None, torch.float64))
    torch.testing.assert_close(
        F.cross_entropy(deferred, labels, **options), F.cross_entropy(hidden @ weight.T, labels, **options)
    )
    assert deferred._made is None
    weighted = F.cross_entropy(
        deferred, labels, weight=torch.rand(V, dtype=torch.float64)
    )  # torch's own, of the logits
    assert deferred._made is not None
    assert weighted.isfinite()


LEFT: dict[str, Callable[[Any], Any]] = {
    "fewer, longer rows": lambda x: x.view(3, -1),
    "longer rows": lambda x: x.reshape(3, 2 * V),
    "shorter rows": lambda x: x.view(-1, V // 2),
    "one row": lambda x: x.flatten(),
    "rows with their tokens": lambda x: x.view(2, 3, V).flatten(1),
    "of another tensor": lambda x: x.to(torch.ones(1, dtype=torch.float32)),
    "on another device": lambda x: x.to("meta"),
    "a bias of one": lambda x: x + torch.ones(1, dtype=x.dtype),
    "a bias for each row": lambda x: x + torch.arange(6 * V, dtype=x.dtype).view(6, V),
    "a row of biases": lambda x: x + torch.arange(V, dtype=x.dtype)[None],
    "a negative cap": lambda x: torch.tanh(x) * -2.0,
    "a cap of 0": lambda x: torch.tanh(x) * 0.0,
    "joined": lambda x: torch.cat([x, x * 2]),
}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.parametrize("biased", [True, False])
def test_what_is_no_step_is_done_to_the_logits(name: str, biased: bool) -> None:
    mine, plain = ends(biased=biased), ends(biased=biased)
    found, expected = LEFT[name](deferred_of(*mine)), LEFT[name](F.linear(*plain))
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)
    if expected.device.type == "meta":
        return
    of = [F.cross_entropy(one, LABELS) if one.shape == (6, V) else one.sin().sum() for one in (found, expected)]
    torch.testing.assert_close(*of)
    torch.testing.assert_close(found + 0, expected)
    for one, other in zip(torch.autograd.grad(of[0], mine), torch.autograd.grad(of[1], plain), strict=True):
        torch.testing.assert_close(one, other)


def test_whole_numbers_of_them_are_a_plain_tensor() -> None:
    mine = ends()
    found = deferred_of(*mine).to(torch.int64)
    assert type(found) is torch.Tensor and not found.requires_grad
    assert torch.equal(found, F.linear(*mine).to(torch.int64))


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.parametrize("old", [{"reduce": False}, {"size_average": False}])
def test_its_cross_entropy_takes_what_torchs_once_took(old: Any) -> None:
    mine = ends()
    expected = F.cross_entropy(F.linear(*mine), LABELS, **old)
    torch.testing.assert_close(F.cross_entropy(deferred_of(*mine), LABELS, **old), expected)


def test_a_padded_vocabulary_may_be_cut_off() -> None:
    """Inkling 2 does it after a softcap."""
    hidden, weight = torch.randn(6, 4, dtype=torch.float64), torch.randn(V, 4, dtype=torch.float64)
    bias, labels = torch.randn(V, dtype=torch.float64), torch.tensor([1, 2, -100, 4, 5, 39])
    ends = [one.clone().requires_grad_() for one in (hidden, weight, bias)]
    deferred: Any = DeferredLogits(Product(ends[0], ends[1], ends[2], torch.float64))
    cut = ((deferred / 3).tanh() * 3)[..., :40]
    loss = F.cross_entropy(cut, labels)
    assert isinstance(cut, DeferredLogits)
    assert cut._made is None
    loss.backward()
    expected = [one.clone().requires_grad_() for one in (hidden, weight, bias)]
    plain = F.cross_entropy((F.linear(*expected) / 3).tanh()[..., :40] * 3, labels)
    plain.backward()
    torch.testing.assert_close(loss, plain)
    for one, other in zip(ends, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_bias_of_another_precision_than_the_matrix_is_not_rounded() -> None:
    hidden, weight = torch.randn(6, 4, dtype=torch.bfloat16), torch.randn(V, 4, dtype=torch.bfloat16)
    bias = torch.randn(V)
    found = F.cross_entropy(deferred_of(hidden, weight).float() + bias, LABELS)
    torch.testing.assert_close(found, F.cross_entropy(F.linear(hidden, weight).float() + bias, LABELS))


def test_a_bias_of_zeros_in_another_precision_learns() -> None:
    hidden, weight = torch.randn(6, 4, dtype=torch.bfloat16), torch.randn(V, 4, dtype=torch.bfloat16)
    bias = torch.zeros(V, requires_grad=True)
    F.cross_entropy(deferred_of(hidden, weight).float() + bias, LABELS).backward()
    assert bias.grad is not None and bias.grad.abs().sum() > 0


class Pair(NamedTuple):
    one: Any
    other: Any


def test_several_of_them_are_several_tensors() -> None:
    logits = F.linear(*ends())
    for kind in (list, tuple, lambda both: Pair(*both)):
        found = torch.cat(kind([deferred_of(*ends()), deferred_of(*ends())]))
        torch.testing.assert_close(found, torch.cat([logits, logits]))


def test_copies_and_pickles_are_plain_logits() -> None:
    deferred = DeferredLogits(Product(torch.ones(2, 4), torch.ones(V, 4), None, torch.float32))
    for copied in (copy.deepcopy(deferred), pickle.loads(pickle.dumps(deferred))):
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, torch.full((2, V), 4.0))
        copied.zero_()
        assert deferred.made().all()
    assert "DeferredLogits(shape=(2, 50)" in repr(DeferredLogits(deferred.product))


# --- their place in the graph, which DDP and FSDP look at ------------------------------------------------------------


def test_asking_whether_they_have_gradients_computes_nothing() -> None:
    deferred = deferred_of(*ends())
    assert deferred.requires_grad
    assert not deferred.is_leaf
    assert deferred._base is None
    assert deferred.grad_fn is not None
    assert not (deferred.is_quantized or deferred.is_sparse or deferred.is_cuda or deferred.is_meta)
    assert deferred._made is None
    with torch.no_grad():
        assert deferred[-1:].argmax(-1).shape == (1,)
    assert deferred._made is None, "all were made for one row, which needs no gradient"
    assert not deferred_of(*(one.detach() for one in ends())).requires_grad


@pytest.mark.parametrize("step", [lambda x: x, lambda x: (x / 3).tanh() * 3, lambda x: x[..., :40] * 2])
@pytest.mark.parametrize("biased", [True, False])
def test_a_hook_on_them_sees_the_gradient_that_logits_have(biased: bool, step: Callable[[Any], Any]) -> None:
    """FSDP puts one on all that leaves a module, and gathers the parameters when it is called."""
    mine, plain = ends(biased=biased), ends(biased=biased)
    seen: list[torch.Tensor] = []
    deferred, logits = step(deferred_of(*mine)), step(F.linear(*plain))
    deferred.register_hook(seen.append)
    logits.retain_grad()
    assert deferred._made is None
    F.cross_entropy(deferred * 1.0, LABELS).backward()
    F.cross_entropy(logits * 1.0, LABELS).backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], logits.grad)
    for one, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_hook_that_was_put_on_after_the_loss_makes_no_logits_and_is_called_when_they_are_used() -> None:
    mine = ends()
    deferred = deferred_of(*mine)
    loss = F.cross_entropy(deferred, LABELS)
    called: list[int] = []
    deferred.register_hook(lambda _: called.append(1))
    loss.backward(retain_graph=True)
    assert deferred._made is None
    assert called == []
    (loss + deferred.logsumexp(-1).sum()).backward()
    assert called == [1]


class Sink(torch.autograd.Function):
    """As DDP's, through which it sends what leaves a model."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(one.clone() for one in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        Sink.calls += 1
        return gradients


@pytest.mark.parametrize("inside", [True, False])
def test_gradients_come_by_what_was_put_behind_them(inside: bool) -> None:
    mine, plain = ends(), ends()
    Sink.calls = 0
    deferred = deferred_of(*mine)
    loss = F.cross_entropy(deferred, LABELS)
    sink: Any = Sink.apply
    out, given_back = sink(deferred, loss)
    assert isinstance(out, DeferredLogits)
    (given_back if inside else F.cross_entropy(out, LABELS)).backward()
    assert Sink.calls == 1
    assert (out._made is None) == inside
    F.cross_entropy(F.linear(*plain), LABELS).backward()
    for one, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Floor(torch.autograd.Function):
    """Writes to a copy, without autograd, which gives what is returned a place in the graph afterwards."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, step: Callable[[Any], Any]) -> torch.Tensor:
        out: torch.Tensor = step(logits)
        out[..., 40:] = -10.0
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        found = gradients[0].clone()
        found[..., 40:] = 0.0
        return found, None


@pytest.mark.parametrize("step", [lambda x: x.clone(), lambda x: x * 2, lambda x: (x / 2).tanh()])
def test_what_a_function_returns_has_the_gradient_that_it_computes(step: Callable[[Any], Any]) -> None:
    floor: Any = Floor.apply
    found = []
    for deferred in (True, False):
        leaves = ends()
        out = floor(deferred_of(*leaves) if deferred else F.linear(*leaves), step)
        part = out[1:]
        found.append([part.min(), *torch.autograd.grad(part.logsumexp(-1).sum() + out[0].sum(), leaves)])
    torch.testing.assert_close(*found)


def test_a_part_of_what_a_function_has_written_to_is_written_to() -> None:
    parts: list[Any] = []

    def step(logits: Any) -> Any:
        out = logits.clone()
        parts.append(out[1:])
        return out

    floor: Any = Floor.apply
    for logits in (deferred_of(*ends()), F.linear(*ends())):
        floor(logits, step).sum()
    with torch.no_grad():
        assert [part[..., 40:].max().item() for part in parts] == [-10.0, -10.0]


def test_a_look_inside_of_a_checkpoint_leaves_them_their_gradients() -> None:
    def head(*leaves: torch.Tensor) -> tuple[torch.Tensor, Any]:
        logits = deferred_of(*leaves)
        logits.argmax(-1)
        return F.cross_entropy(logits, LABELS), logits

    mine, plain = ends(), ends()
    loss, logits = checkpoint(head, *mine, use_reentrant=True)
    (loss + logits.logsumexp(-1).mean()).backward()
    expected = F.linear(*plain)
    (F.cross_entropy(expected, LABELS) + expected.logsumexp(-1).mean()).backward()
    torch.testing.assert_close([one.grad for one in mine], [one.grad for one in plain])


@pytest.mark.parametrize("biased", [True, False])
def test_gradients_that_come_by_their_place_have_gradients(biased: bool) -> None:
    found = []
    for deferred in (True, False):
        leaves = ends(biased=biased)
        logits = deferred_of(*leaves) if deferred else F.linear(*leaves)
        logits.register_hook(lambda gradient: None)
        (first,) = torch.autograd.grad(logits.logsumexp(-1).square().sum(), leaves[:1], create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), leaves))
    torch.testing.assert_close(*found)


# --- when they were made, and where ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_look_without_autograd_leaves_the_loss_its_gradients(mode: Callable[[], Any]) -> None:
    mine = ends()
    deferred = deferred_of(*mine)
    with mode():
        deferred.argmax(-1)
    F.cross_entropy(deferred, LABELS).backward()
    assert all(one.grad is not None for one in mine)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_those_of_a_model_without_autograd_have_no_gradients_after_it(mode: Callable[[], Any]) -> None:
    mine = ends()
    with mode():
        deferred = deferred_of(mine[0] * 1, *mine[1:], grad=torch.is_grad_enabled())
    assert not deferred.requires_grad
    assert not F.cross_entropy(deferred, LABELS).requires_grad
    assert not (deferred + 0).requires_grad
    with mode():
        again = deferred_of(mine[0] * 1, *mine[1:], grad=torch.is_grad_enabled())
    bias = torch.zeros(V, dtype=torch.float64, requires_grad=True)
    F.cross_entropy(again + bias, LABELS).backward()
    assert bias.grad is not None and bias.grad.abs().sum() > 0
    with torch.no_grad():
        assert not deferred_of(*mine).float().requires_grad


def test_those_of_a_model_outside_of_autocast_are_not_cast_inside() -> None:
    mine = [one.detach().float() for one in ends()]
    logits = F.linear(*mine)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(deferred_of(*mine).made(), logits)
        found = F.cross_entropy(deferred_of(*mine), LABELS)
    torch.testing.assert_close(found, F.cross_entropy(logits, LABELS), rtol=1e-6, atol=0.0)


def test_logits_of_a_matrix_that_has_changed_since_are_refused() -> None:
    """They would be neither those of then nor of now."""
    hidden, weight, bias = ends()
    deferred = deferred_of(hidden, weight, bias)
    view = deferred[..., :40]
    F.cross_entropy(deferred, LABELS).backward()
    torch.optim.SGD([weight], lr=0.1).step()
    for one in (deferred, view):
        with pytest.raises(UsageError, match="has changed since the model ran"):
            one.argmax(-1)
        with pytest.raises(UsageError, match="has changed since the model ran"):
            F.cross_entropy(one, LABELS)


CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "matrix": lambda hidden, weight, bias: weight.mul_(2),
    "input": lambda hidden, weight, bias: hidden.div_(hidden.norm()),
    "bias": lambda hidden, weight, bias: bias.add_(1),
    "matrix, of another size": lambda hidden, weight, bias: setattr(weight, "data", torch.zeros(V + 8, 4)),
    "matrix, of another dtype": lambda hidden, weight, bias: setattr(weight, "data", weight.bfloat16()),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_whatever_of_a_head_has_changed_since_is_named(change: str) -> None:
    hidden, weight, bias = ends()
    deferred = deferred_of(hidden, weight, bias)
    views = deferred, deferred[..., :40], deferred.view(2, 3, V), deferred * 2
    CHANGES[change](hidden, weight, bias)
    for one in views[: 1 if "another" in change else None]:
        with pytest.raises(UsageError, match=f"the head's {change.partition(',')[0]} has changed since the model ran"):
            one.argmax(-1)


def test_a_matrix_that_was_freed_is_named() -> None:
    """FSDP2 takes the storage away, ZeRO-3 the numbers and the shape."""
    hidden, weight, bias = ends()
    deferred = deferred_of(hidden, weight, bias)
    weight.untyped_storage().resize_(0)
    with pytest.raises(UsageError, match="was freed after the head's forward pass"):
        F.cross_entropy(deferred, LABELS)
    hidden, weight, bias = ends()
    deferred = deferred_of(hidden, weight, bias)
    weight.data = torch.empty(0, dtype=weight.dtype)
    with pytest.raises(UsageError, match="was freed after the head's forward pass"):
        deferred.sum()


class Doubled(torch.autograd.Function):
    """Passes deferred logits on, and doubles their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0]


@pytest.mark.filterwarnings("ignore:use_tied_loss")
@pytest.mark.parametrize("passed", [False, True])
def test_in_a_sum_the_second_logits_keep_the_node_that_a_function_gave_them(passed: bool) -> None:
    """The sum of two heads is one loss; but gradients of the second have to pass through that node, if there is one."""
    torch.manual_seed(0)
    tensors = [torch.randn(*shape).requires_grad_() for shape in ((6, 4), (9, 4), (6, 2), (9, 2))]
    hidden, weight, left, right = tensors
    labels = torch.randint(0, 9, (6,))
    doubled: Any = Doubled.apply
    other = deferred_of(left, right)
    both = deferred_of(hidden, weight) + (doubled(other) if passed else other)
    found = torch.autograd.grad(F.cross_entropy(both, labels), tensors)
    plain = hidden @ weight.T + left @ right.T
    expected = torch.autograd.grad(F.cross_entropy(plain, labels), tensors)
    factors = (1, 1, 2, 2) if passed else (1, 1, 1, 1)
    torch.testing.assert_close(found, tuple(one * by for one, by in zip(expected, factors, strict=True)))
