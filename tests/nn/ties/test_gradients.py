"""What a tie must survive, and its gradient through each: the sum of both ends', as an untied float64 model has it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from bowline.nn import check_ties, find_ties, tie_weights, untie_weights
from tests.nn.models import BertLike, EncoderDecoder, TinyLM, backward, tied

IDS = torch.tensor([[1, 2, 3, 9, 1], [4, 1, 0, 5, 10]])


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    """Next-token cross-entropy."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def reference(model: nn.Module, ties: dict[str, str]) -> dict[str, torch.Tensor]:
    """In float64, each end with a matrix of its own: the gradients of the ends of a tie, summed at its source."""
    apart = copy.deepcopy(model).double()
    for name in ties:
        path, _, attribute = name.rpartition(".")
        module = apart.get_submodule(path)
        setattr(module, attribute, nn.Parameter(getattr(module, attribute).detach().clone()))
    assert len({id(p) for p in apart.parameters()}) == len(list(apart.named_parameters(remove_duplicate=False)))
    backward(loss_of(apart(IDS)))
    grads = {
        name: p.grad.clone() if p.grad is not None else torch.zeros_like(p) for name, p in apart.named_parameters()
    }
    for target, source in ties.items():
        grads[source] += grads.pop(target)
    return grads


EMA: Any = get_ema_multi_avg_fn(0.9)
HEAD = {"head.weight": "emb.weight"}


def lm(**arguments: Any) -> TinyLM:
    return tied(TinyLM(**arguments))


def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """By the names that `model` has, wrappers' prefixes left out."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name.removeprefix("_orig_mod.").removeprefix("module.")] = parameter.grad
    return found


def assert_grads(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, rtol: float = 1e-4) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = float(value.abs().max())
        torch.testing.assert_close(found[name].double(), value, rtol=rtol, atol=rtol * scale, msg=name)


def assert_tied(model: nn.Module) -> None:
    ties = find_ties(model)
    assert len(ties) == 1
    assert not ties.aliases
    assert check_ties(model)


# --- the gradient itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [TinyLM, BertLike, EncoderDecoder])
def test_a_tied_gradient_is_the_sum_of_its_ends(make: Callable[[], nn.Module]) -> None:
    model = make()
    report = tie_weights(model, on_conflict="source")
    model.zero_grad()
    backward(loss_of(model(IDS)))
    assert_grads(grads_of(model), reference(model, {c.tie.target: c.tie.source for c in report.checks}))


def test_neither_end_alone_is_that_sum() -> None:
    """So the comparison can fail: each end's share is a part that counts."""
    model = lm()
    apart = copy.deepcopy(model).double()
    untie_weights(apart)
    backward(loss_of(apart(IDS)))
    expected = reference(model, HEAD)["emb.weight"]
    for end in (apart.emb, apart.head):
        assert end.weight.grad is not None
        assert (end.weight.grad - expected).abs().max() > 0.1 * expected.abs().max()


def test_the_gradient_is_that_of_finite_differences() -> None:
    model = lm().double()
    table = model.emb.weight.detach().clone().requires_grad_()

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return loss_of(functional_call(model, {"emb.weight": weight}, (IDS,)))

    assert torch.autograd.gradcheck(loss, (table,))


# --- what runs a model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["emb.weight", "head.weight"])
def test_functional_call_takes_one_name_for_both_ends(name: str) -> None:
    model = lm()
    given: dict[str, torch.Tensor] = dict(model.named_parameters())
    given[name] = given.pop("emb.weight")

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss_of(functional_call(model, parameters, (IDS,)))

    found = grad(loss)(given)
    found["emb.weight"] = found.pop(name)
    assert_grads(found, reference(model, HEAD))
    assert_tied(model)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_tied_and_its_gradient_is_the_sum(backend: str) -> None:
    torch._dynamo.reset()
    model = lm()
    compiled: Any = torch.compile(model, backend=backend)
    backward(loss_of(compiled(IDS)))
    assert_grads(grads_of(compiled), reference(model, HEAD))
    assert_tied(compiled)
    assert_tied(model)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_tying_after_compiling_is_seen_by_the_next_call(backend: str) -> None:
    torch._dynamo.reset()
    model = TinyLM()
    compiled: Any = torch.compile(model, backend=backend)
    compiled(IDS)
    tie_weights(model, on_conflict="source")
    backward(loss_of(compiled(IDS)))
    assert_grads(grads_of(model), reference(model, HEAD))


class Checkpointed(TinyLM):
    """Every stage recomputed in the backward pass, the table's two uses among them."""

    use_reentrant: bool = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(ids)
        for stage in (self.norm, self.head):
            hidden = checkpoint(stage, hidden, use_reentrant=self.use_reentrant)
        return cast(torch.Tensor, hidden)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_keeps_the_sum(use_reentrant: bool) -> None:
    model = Checkpointed()
    model.use_reentrant = use_reentrant
    tied(model)
    backward(loss_of(model(IDS)))
    assert_grads(grads_of(model), reference(lm(), HEAD))
    assert_tied(model)


def test_accumulating_over_two_backwards_doubles_it() -> None:
    model = lm()
    for _ in range(2):
        backward(loss_of(model(IDS)))
    assert_grads(grads_of(model), {name: 2 * value for name, value in reference(model, HEAD).items()})


def test_autocast_keeps_the_tie() -> None:
    model = lm()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(IDS)
    backward(loss_of(logits.float()))
    assert_grads(grads_of(model), reference(model, HEAD), rtol=5e-2)
    assert_tied(model)


# --- what copies a model ---------------------------------------------------------------------------------------------


def pickled(model: TinyLM) -> TinyLM:
    again: TinyLM = pickle.loads(pickle.dumps(model))
    return again


def saved(model: TinyLM) -> TinyLM:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    again: TinyLM = torch.load(stream, weights_only=False)
    return again


def averaged(model: TinyLM) -> TinyLM:
    average = AveragedModel(model)
    average.update_parameters(model)
    inner = average.module
    assert isinstance(inner, TinyLM)
    return inner


def ema(model: TinyLM) -> TinyLM:
    average = AveragedModel(model, multi_avg_fn=EMA)
    for _ in range(3):
        average.update_parameters(model)
    inner = average.module
    assert isinstance(inner, TinyLM)
    return inner


@pytest.mark.parametrize("copying", [copy.deepcopy, pickled, saved, averaged, ema], ids=lambda way: way.__name__)
def test_a_copy_is_tied_within_itself_and_to_nothing_else(copying: Callable[[TinyLM], TinyLM]) -> None:
    model = lm()
    again = copying(model)
    assert_tied(again)
    assert again.emb.weight is not model.emb.weight
    assert again.emb.weight.data_ptr() != model.emb.weight.data_ptr()
    again.requires_grad_(True)
    backward(loss_of(again(IDS)))
    assert_grads(grads_of(again), reference(model, HEAD))
    assert model.emb.weight.grad is None


@pytest.mark.parametrize(
    ("cast", "rtol"),
    [
        (lambda model: model.double(), 1e-9),
        (lambda model: model.to(torch.float64).to(torch.float32), 1e-4),
        (lambda model: model.bfloat16(), 5e-2),
        (lambda model: model.half(), 1e-2),
        (lambda model: model.to("cpu"), 1e-4),
    ],
    ids=["double", "there-and-back", "bfloat16", "half", "to-cpu"],
)
def test_a_cast_keeps_the_tie(cast: Callable[[nn.Module], nn.Module], rtol: float) -> None:
    model = cast(lm())
    assert_tied(model)
    backward(loss_of(model(IDS).to(torch.float64)))
    assert_grads(grads_of(model), reference(model, HEAD), rtol=rtol)


def test_an_ema_follows_the_shared_matrix_once() -> None:
    """0.9 of the old and 0.1 of the new, and not that twice because two names lead to it."""
    model = lm()
    average = AveragedModel(model, multi_avg_fn=EMA)
    average.update_parameters(model)
    old = model.emb.weight.detach().clone()
    with torch.no_grad():
        model.emb.weight.add_(1.0)
    average.update_parameters(model)
    torch.testing.assert_close(average.module.get_parameter("head.weight").detach(), old + 0.1)


def test_clipping_counts_the_shared_gradient_once() -> None:
    model = lm()
    backward(loss_of(model(IDS)))
    expected = torch.stack([g.norm() for g in reference(model, HEAD).values()]).norm()
    torch.testing.assert_close(nn.utils.clip_grad_norm_(model.parameters(), 1.0).double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("build", [torch.optim.SGD, torch.optim.AdamW])
def test_training_steps_are_those_of_a_float64_model_whose_gradients_are_summed(build: Any) -> None:
    model = lm()
    apart = copy.deepcopy(model).double()
    untie_weights(apart)
    one = build(model.parameters(), lr=0.05)
    other = build([p for name, p in apart.named_parameters() if name != "head.weight"], lr=0.05)
    for _ in range(5):
        one.zero_grad()
        apart.zero_grad()
        backward(loss_of(model(IDS)))
        backward(loss_of(apart(IDS)))
        assert apart.emb.weight.grad is not None
        assert apart.head.weight.grad is not None
        apart.emb.weight.grad += apart.head.weight.grad
        one.step()
        other.step()
        with torch.no_grad():
            apart.head.weight.copy_(apart.emb.weight)
    torch.testing.assert_close(model.head.weight.detach().double(), apart.emb.weight.detach(), rtol=1e-3, atol=1e-4)
