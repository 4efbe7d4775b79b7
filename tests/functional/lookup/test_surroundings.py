"""The lookup under what training code puts around it: checkpoints, hooks on saved tensors, autocast, compilers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it
from torch.utils.checkpoint import checkpoint

from bowline.functional import shared_gradient
from bowline.functional.shared_gradient import head_weight, leave_rows, meeting
from bowline.functional.tied_lookup import tied_embedding
from tests.functional.lookup.ends import (
    D,
    Lookup,
    N,
    V,
    addresses,
    body,
    dense_gradients,
    head,
    loss_of,
    matrix,
    near,
    plain,
    tied,
    tokens,
    untied,
)

pytestmark = [  # torch's own, in its compiler and in its forward differentiation
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script`:FutureWarning:torch.jit._script"),  # since torch 2.14
]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("what", ["body", "lookup and body", "head", "all"])
def test_activation_checkpoints(reentrant: bool, what: str) -> None:
    weight = matrix(torch.float64)
    anchor = torch.zeros((), dtype=torch.float64, requires_grad=True)  # a reentrant one needs an input with a gradient

    def lookup_and_body(anchor: torch.Tensor) -> torch.Tensor:
        return body(tied_embedding(tokens(), weight)) + anchor

    def run(function: Any, *args: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(function, *args, use_reentrant=reentrant)
        return result

    if what == "body":
        logits = head(run(body, tied_embedding(tokens(), weight)), weight)
    elif what == "lookup and body":
        logits = head(run(lookup_and_body, anchor), weight)
    elif what == "head":
        logits = run(lambda hidden: head(hidden, weight), body(tied_embedding(tokens(), weight)))
    else:
        logits = run(lambda anchor: head(lookup_and_body(anchor), weight), anchor)
    # reentrant, a checkpoint is a backward pass of its own, and ends that it parts do not meet
    with dense_gradients(int(reentrant and what in ("lookup and body", "head"))):
        loss_of(logits).backward()
    near(weight.grad, untied(plain, weight))


def test_saved_tensors_may_be_packed_and_copied() -> None:
    weight = matrix(torch.float64)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        loss = tied(plain, weight)
    with dense_gradients(0):
        loss.backward()
    near(weight.grad, untied(plain, weight))


def test_ids_that_are_changed_before_the_backward_pass_are_told() -> None:
    weight, ids = matrix(), tokens()
    loss = tied_embedding(ids, weight).sum()
    ids += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("casts", ["before the head", "in the head"])
def test_autocast(casts: str) -> None:
    """A head that is given a cast matrix returns its gradient to the cast; one that casts inside meets the lookup."""

    class Casting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(hidden.bfloat16(), weight.bfloat16())
            return hidden.bfloat16() @ weight.bfloat16().t()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            hidden, weight = ctx.saved_tensors
            grad_weight = grads[0].float().t() @ hidden.float()
            addresses.append(grad_weight.data_ptr())
            return (grads[0] @ weight).float(), grad_weight

    weight = matrix()
    function: Any = Casting
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = tied_embedding(tokens(), weight)
        assert rows.dtype == torch.float32
        inside = casts == "in the head"
        logits = (
            function.apply(rows, head_weight(weight)) if inside else head(rows.bfloat16(), weight.to(torch.bfloat16))
        )
    with dense_gradients(0 if inside else 1):
        loss_of(logits.float()).backward()
    expected = untied(lambda lookup, to_logits: loss_of(to_logits(lookup(tokens()))), weight)
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert (weight.grad - expected).norm() < 0.01 * expected.norm()
    if inside:
        assert weight.grad.data_ptr() == addresses[-1]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("what", ["model", "lookup", "body"])
def test_a_compiler_sees_f_embedding(backend: str, what: str) -> None:
    weight = matrix(torch.float64)
    lookup: Lookup = lambda ids: tied_embedding(ids, weight)  # noqa: E731
    inner = body

    def model(ids: torch.Tensor) -> torch.Tensor:
        return F.linear(body(tied_embedding(ids, weight)), weight)

    torch.compiler.reset()
    if what == "model":
        logits = torch.compile(model, backend=backend, fullgraph=True)(tokens())
    else:
        if what == "lookup":
            lookup = torch.compile(lookup, backend=backend, fullgraph=True)
        else:
            inner = torch.compile(body, backend=backend, fullgraph=True)
        logits = head(inner(lookup(tokens())), weight)
    with dense_gradients(0):  # the compiler's own is torch's, and a compiled body is no hindrance
        loss_of(logits).backward()
    near(weight.grad, untied(plain, weight))


def test_a_compiled_head_with_an_explicit_backward_is_traced() -> None:
    weight, ids = matrix(torch.float64), tokens()
    torch.compiler.reset()

    def model(ids: torch.Tensor) -> torch.Tensor:
        return loss_of(head(body(tied_embedding(ids, weight)), weight))

    torch.compile(model, backend="aot_eager", fullgraph=True)(ids).backward()
    near(weight.grad, untied(plain, weight))


def test_a_compiled_backward_pass() -> None:
    from torch._dynamo import compiled_autograd

    weight = matrix(torch.float64)
    torch.compiler.reset()
    loss = tied(plain, weight)
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
        loss.backward()
    near(weight.grad, untied(plain, weight))


def test_functional_transforms_are_torchs_own() -> None:
    weight, ids = matrix(torch.float64).detach(), tokens(3, N)

    def loss(table: torch.Tensor, some: torch.Tensor) -> torch.Tensor:
        return loss_of(F.linear(body(tied_embedding(some, table)), table))

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, ids)
    for gradient, some in zip(gradients, ids, strict=True):
        near(gradient, untied(lambda lookup, end, some=some: loss_of(end(body(lookup(some)))), weight))  # type: ignore[misc]
    direction = torch.ones_like(weight)
    _, forward, *_ = torch.func.jvp(lambda table: loss(table, ids[0]), (weight,), (direction,))
    near(forward, (torch.func.grad(loss)(weight, ids[0]) * direction).sum())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weight.clone().requires_grad_(), direction)
        assert forward_ad.unpack_dual(tied_embedding(ids, dual)).tangent is not None


def test_batched_gradients_of_two_lookups_are_torchs_own() -> None:
    """They have no memory in which the second could add its rows to the first's."""
    ids, others = torch.tensor([1, 2, 2]), torch.tensor([3, 0, 2])

    def products(lookup: Any) -> Any:
        def made(weight: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = (lookup(ids, weight) * lookup(others, weight)).sum(1)
            return found

        jacobian: Any = torch.autograd.functional.jacobian
        return jacobian(made, torch.arange(36.0).view(9, 4), vectorize=True)

    assert torch.equal(products(tied_embedding), products(F.embedding))


def test_export_and_trace_hold_an_ordinary_embedding() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = matrix()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.linear(tied_embedding(ids, self.weight), self.weight)

    model = Model()
    program = torch.export.export(model, (tokens(),))
    assert "embedding" in str(program.graph)
    assert torch.equal(program.module()(tokens()), model(tokens()))
    assert copy.deepcopy(model)(tokens()).shape == (N, V)
    with torch.device("meta"):
        assert tied_embedding(tokens().to("meta"), torch.empty(V, D, requires_grad=True)).shape == (N, D)


@pytest.mark.parametrize("missing", ["_current_graph_task_id", "_storage_address", "_storage_Use_Count"])
def test_a_torch_without_the_private_functions_adds_to_a_gradient_of_its_own(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the number of the pass the lookup's gradient is dense, without the counts the head's is copied."""
    weight = matrix(torch.float64)
    monkeypatch.delattr(torch._C, missing)
    shared_gradient._counts_of_one_owner.cache_clear()
    dense = int(missing == "_current_graph_task_id")
    try:
        loss = tied(plain, weight)
        with dense_gradients(dense, copies=1 - dense):
            loss.backward()
        near(weight.grad, untied(plain, weight))
    finally:
        shared_gradient._counts_of_one_owner.cache_clear()


@pytest.mark.parametrize("otherwise", ["copies", "hides owners", "hides its own owners"])
def test_a_torch_that_keeps_its_buffers_otherwise_gives_a_copy(otherwise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial on six numbers finds it: a gradient that is copied when it arrives, owners that are not counted."""
    if otherwise == "copies":
        given = shared_gradient._Trial.given
        monkeypatch.setattr(shared_gradient._Trial, "given", lambda self, gradient: given(self, gradient.clone()))
    elif otherwise == "hides owners":
        monkeypatch.setattr(shared_gradient, "_counts", lambda gradient: (1, 1, 1))
    else:
        counts: Any = shared_gradient._counts

        def hiding(gradient: torch.Tensor) -> tuple[int, int, int]:
            in_python, in_torch, _ = counts(gradient)
            return in_python - (in_torch > 1), 1, 1  # some versions hold the Python object where torch holds the tensor

        monkeypatch.setattr(shared_gradient, "_counts", hiding)
    shared_gradient._counts_of_one_owner.cache_clear()
    try:
        assert shared_gradient._counts_of_one_owner() == shared_gradient.NEVER
        weight = matrix(torch.float64)
        loss = tied(plain, weight)
        with dense_gradients(0, copies=1):
            loss.backward()
        near(weight.grad, untied(plain, weight))
    finally:
        shared_gradient._counts_of_one_owner.cache_clear()


def test_this_torch_lets_its_buffers_be_written_to() -> None:
    assert shared_gradient._counts_of_one_owner() != shared_gradient.NEVER


def test_the_trial_is_not_seen_by_the_modes_of_its_caller() -> None:
    """Its first use may be inside a backward pass, a checkpoint's recomputation, or autocast."""
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    shared_gradient._counts_of_one_owner.cache_clear()
    with (
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.device("meta"),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        assert shared_gradient._counts_of_one_owner() != shared_gradient.NEVER
    assert not packed


def test_only_plain_contiguous_gradients_are_written_to() -> None:
    class Give(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor, make: Any) -> torch.Tensor:
            ctx.make = make
            return weight.sum()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return ctx.make(), None

    whole = torch.ones(V + 1, D)
    kinds: list[tuple[Any, int, int]] = [  # a gradient of ones, and the dense gradients and copies that it costs
        (lambda: torch.ones(V, D), 0, 0),
        (lambda: torch.ones(D, V).t(), 0, 1),
        (lambda: torch.ones(1, D).expand(V, D), 0, 1),
        (lambda: whole[:V], 0, 1),
        (lambda: nn.Parameter(torch.ones(V, D), requires_grad=False), 1, 0),
        (lambda: torch.ones(V, D).to_sparse(), 1, 0),
        (lambda: torch.ones(V, D, requires_grad=True), 0, 1),
        (lambda: torch.ones(V, D, dtype=torch.float64), 0, 0),  # autograd casts it to the matrix's
        (lambda: None, 1, 0),
    ]
    give: Any = Give
    for make, dense, copies in kinds:
        weight = matrix()
        rows = tied_embedding(tokens(), weight)
        loss = rows.sum() + give.apply(head_weight(weight), make)
        with dense_gradients(dense, copies=copies):
            loss.backward()
        grad_rows = torch.bincount(tokens(), minlength=V)[:, None].expand(V, D).float()
        near(weight.grad, (grad_rows + (make() is not None)).double())
    assert torch.equal(whole, torch.ones(V + 1, D))


def test_outside_a_backward_pass_nothing_is_left() -> None:
    weight = matrix()
    edge = meeting(weight)
    assert edge is not None
    with torch.no_grad():
        assert not leave_rows(edge, tokens(), torch.ones(N, D), -1)
