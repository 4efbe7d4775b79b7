"""The loss at the head against torch's own, against sums spelled out in float64, and against finite differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.errors import UsageError
from bowline.nn.loss import linear_cross_entropy, linear_logits

BACKENDS = ["reference", "logits"]
D, V = 5, 11
OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 0.01},
    {"softcap": 2.0},
    {"logit_scale": 0.3},
    {"mask_ids": [0, 10]},
    {"label_smoothing": 0.2, "z_loss": 0.02, "softcap": 3.0, "logit_scale": 1.7, "mask_ids": [3]},
]


def case(
    *shape: int, bias: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """hidden (..., D), weight (V, D), labels (...) with a few ignored and none of 0, 3, 10, and a bias (V,)."""
    torch.manual_seed(seed)
    shape = shape or (2, 4)
    hidden = torch.randn(*shape, D).to(dtype).requires_grad_()
    weight = torch.randn(V, D).to(dtype).requires_grad_()
    labels = torch.tensor([1, 2, 4, 5, 6, 7, 8, 9])[torch.randint(0, 8, shape)]
    labels.view(-1)[1::3] = -100
    return hidden, weight, labels, torch.randn(V).to(dtype).requires_grad_() if bias else None


def by_hand(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: torch.Tensor | None = None,
    mask_ids: list[int] | None = None,
    ignore_index: int = -100,
) -> tuple[list[float], float, list[float]]:
    """Each position's loss, the divisor of the mean, and each lse: Python's own numbers, one at a time."""
    losses, divisor, lses = [], 0.0, []
    rows, table = hidden.detach().reshape(-1, hidden.shape[-1]).tolist(), weight.detach().tolist()
    added = bias.detach().tolist() if bias is not None else [0.0] * len(table)
    for row, label in zip(rows, labels.flatten().tolist(), strict=True):
        logits = {}
        for token, line in enumerate(table):
            logit = logit_scale * (sum(a * b for a, b in zip(row, line, strict=True)) + added[token])
            if token not in (mask_ids or ()):
                logits[token] = softcap * math.tanh(logit / softcap) if softcap else logit
        lse = math.log(sum(math.exp(logit) for logit in logits.values()))
        lses.append(lse)
        if label == ignore_index:
            losses.append(0.0)
            continue
        wanted = {token: label_smoothing / len(logits) + (1 - label_smoothing) * (token == label) for token in logits}
        loss = sum(wanted[token] * (lse - logit) for token, logit in logits.items()) + z_loss * lse**2
        factor = 1.0 if class_weight is None else float(class_weight[label])
        losses.append(factor * loss)
        divisor += factor
    return losses, divisor, lses


def gradients(loss: torch.Tensor, *leaves: torch.Tensor | None) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None]))


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_values_and_gradients_are_those_of_torchs_cross_entropy(backend: str, smoothing: float, reduction: str) -> None:
    hidden, weight, labels, bias = case()
    ours = linear_cross_entropy(
        hidden,
        weight,
        labels,
        bias=bias,
        label_smoothing=smoothing,
        reduction=reduction,  # type: ignore[arg-type]
        backend=backend,
    )
    logits = F.linear(hidden, weight, bias).flatten(0, 1)
    theirs = F.cross_entropy(logits, labels.flatten(), label_smoothing=smoothing, reduction=reduction)
    assert ours.shape == (labels.shape if reduction == "none" else ())
    torch.testing.assert_close(ours.flatten(), theirs.flatten())
    torch.testing.assert_close(
        gradients(ours.square().sum(), hidden, weight, bias), gradients(theirs.square().sum(), hidden, weight, bias)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_values_are_those_of_the_sum_spelled_out(backend: str, options: dict[str, Any], weighted: bool) -> None:
    hidden, weight, labels, bias = case()
    class_weight = torch.rand(V, dtype=torch.float64) if weighted else None
    losses, divisor, lses = by_hand(hidden, weight, labels, bias, class_weight=class_weight, **options)
    for reduction, expected in (
        ("none", torch.tensor(losses).view(2, 4)),
        ("sum", torch.tensor(sum(losses))),
        ("mean", torch.tensor(sum(losses) / divisor)),
    ):
        loss, lse = linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias=bias,
            class_weight=class_weight,
            reduction=reduction,  # type: ignore[arg-type]
            return_lse=True,
            backend=backend,
            **options,
        )
        torch.testing.assert_close(loss, expected.double(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(lse, torch.tensor(lses).view(2, 4).double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_factor_for_each_label_is_torchs(backend: str, reduction: Any) -> None:
    hidden, weight, labels, bias = case()
    factors = torch.rand(V, dtype=torch.float64)
    ours = linear_cross_entropy(
        hidden, weight, labels, bias=bias, class_weight=factors, reduction=reduction, backend=backend
    )
    theirs = F.cross_entropy(
        F.linear(hidden, weight, bias).flatten(0, 1), labels.flatten(), weight=factors, reduction=reduction
    )
    torch.testing.assert_close(ours.flatten(), theirs.flatten())
    torch.testing.assert_close(
        gradients(ours.sum(), hidden, weight, bias), gradients(theirs.sum(), hidden, weight, bias)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_without_a_label_add_nothing_and_get_no_gradient(backend: str) -> None:
    hidden, weight, labels, _ = case(bias=False)
    loss = linear_cross_entropy(
        hidden, weight, labels, label_smoothing=0.1, z_loss=0.1, reduction="sum", backend=backend
    )
    counted = labels != -100
    alone = linear_cross_entropy(
        hidden[counted], weight, labels[counted], label_smoothing=0.1, z_loss=0.1, reduction="sum", backend=backend
    )
    torch.testing.assert_close(loss, alone)
    (gradient,) = gradients(loss, hidden)
    assert not gradient[~counted].any()
    assert gradient[counted].abs().sum(-1).min() > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_index_may_be_the_ignored_one(backend: str) -> None:
    hidden, weight, labels, _ = case(bias=False)
    expected = linear_cross_entropy(hidden, weight, labels, backend=backend)
    renamed = labels.masked_fill(labels == -100, 0)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, renamed, ignore_index=0, backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(2, 4), (0,), (3, 0)])
def test_without_any_label_the_mean_is_nan_and_the_sum_zero(backend: str, shape: tuple[int, ...]) -> None:
    hidden, weight, labels, _ = case(*shape)
    labels = torch.full_like(labels, -100)
    assert linear_cross_entropy(hidden, weight, labels, backend=backend).isnan()
    loss = linear_cross_entropy(hidden, weight, labels, reduction="sum", backend=backend)
    assert loss.item() == 0
    assert not any(gradient.any() for gradient in gradients(loss, hidden, weight))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_masked_tokens_get_no_gradient(backend: str) -> None:
    hidden, weight, labels, bias = case()
    loss, logits = linear_cross_entropy(
        hidden, weight, labels, bias=bias, mask_ids=[0, 3], label_smoothing=0.1, return_logits=True, backend=backend
    )
    assert torch.equal((logits == -torch.inf).nonzero()[:, -1].unique(), torch.tensor([0, 3]))
    of_weight, of_bias = gradients(loss, weight, bias)
    assert not of_weight[[0, 3]].any() and not of_bias[[0, 3]].any()
    assert of_weight.isfinite().all() and of_weight[1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_masked_twice_is_masked_once(backend: str) -> None:
    hidden, weight, labels, _ = case()
    once, twice = (
        linear_cross_entropy(hidden, weight, labels, mask_ids=ids, label_smoothing=0.1, backend=backend)
        for ids in ([0, 3], [0, 3, 3])
    )
    torch.testing.assert_close(twice, once)
    torch.testing.assert_close(gradients(twice, hidden, weight), gradients(once, hidden, weight))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_returned_is_what_was_asked_for(backend: str) -> None:
    hidden, weight, labels, bias = case()
    options: dict[str, Any] = {"bias": bias, "softcap": 2.0, "backend": backend}
    loss = linear_cross_entropy(hidden, weight, labels, **options)
    assert isinstance(loss, torch.Tensor)
    one, lse, logits = linear_cross_entropy(hidden, weight, labels, return_lse=True, return_logits=True, **options)
    assert torch.equal(one, loss)
    expected = 2.0 * torch.tanh(F.linear(hidden, weight, bias) / 2.0)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(lse, expected.exp().sum(-1).log())
    assert len(linear_cross_entropy(hidden, weight, labels, return_logits=True, **options)) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_in_the_thousands_do_not_overflow(backend: str) -> None:
    hidden, weight, labels, _ = case(dtype=torch.float32)
    loss = linear_cross_entropy(hidden * 1000, weight, labels, backend=backend)
    expected = F.cross_entropy((hidden * 1000 @ weight.T).flatten(0, 1).double(), labels.flatten())
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    assert all(gradient.isfinite().all() for gradient in gradients(loss, hidden, weight))


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_the_backward_pass_of_logits_is_that_of_finite_differences(options: dict[str, Any], bias: bool) -> None:
    hidden, weight, labels, added = case(1, 3, bias=bias)
    mixture = torch.randn(1, 3, V).double()

    def all_at_once(hidden: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The losses, the lse, and the logits, whose three gradients arrive together."""
        loss, lse, logits = linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias=rest[0] if rest else None,
            reduction="none",
            return_lse=True,
            return_logits=True,
            backend="logits",
            **options,
        )
        return loss, lse.sin(), (logits.masked_fill(logits == -torch.inf, 0) * mixture).sum()

    leaves = (hidden, weight) if added is None else (hidden, weight, added)
    assert torch.autograd.gradcheck(all_at_once, leaves)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("wanted", ["loss", "lse", "logits", "all"])
def test_both_backends_have_the_same_gradients_whatever_they_flow_into(options: dict[str, Any], wanted: str) -> None:
    found = []
    for backend in BACKENDS:
        hidden, weight, labels, bias = case()
        loss, lse, logits = linear_cross_entropy(
            hidden, weight, labels, bias=bias, return_lse=True, return_logits=True, backend=backend, **options
        )
        parts = {
            "loss": loss.square(),
            "lse": lse.square().sum(),
            "logits": logits.masked_fill(logits == -torch.inf, 0).square().sum(),
        }
        total = sum(parts.values()) if wanted == "all" else parts[wanted]
        assert isinstance(total, torch.Tensor)
        found.append(gradients(total, hidden, weight, bias))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_of_a_tied_matrix_the_gradient_is_the_sum_of_both_ends(backend: str, options: dict[str, Any]) -> None:
    _, weight, labels, bias = case()
    ids = torch.randint(0, V, labels.shape)

    def loss_of(table: torch.Tensor, head: torch.Tensor) -> Any:
        hidden = torch.tanh(F.embedding(ids, table))
        return linear_cross_entropy(hidden, head, labels, bias=bias, backend=backend, **options)

    table, head = (weight.detach().clone().requires_grad_() for _ in range(2))
    of_table, of_head = gradients(loss_of(table, head), table, head)
    (tied,) = gradients(loss_of(weight, weight), weight)
    assert of_table.any() and of_head.any()
    torch.testing.assert_close(tied, of_table + of_head)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_tied_gradient_is_that_of_finite_differences(backend: str) -> None:
    _, weight, labels, bias = case(1, 3)
    ids = torch.tensor([[1, 7, 1]])
    assert bias is not None

    def loss_of(tied: torch.Tensor, bias: torch.Tensor) -> Any:
        hidden = torch.tanh(F.embedding(ids, tied))
        return linear_cross_entropy(hidden, tied, labels, bias=bias, label_smoothing=0.1, backend=backend)

    assert torch.autograd.gradcheck(loss_of, (weight, bias))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
@pytest.mark.parametrize("options", OPTIONS)
def test_half_precision_is_near_float64_and_gives_float32(
    backend: str, dtype: torch.dtype, near: float, options: dict[str, Any]
) -> None:
    hidden, weight, labels, bias = case(4, 8, dtype=dtype)
    exact = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight, bias) if leaf is not None]
    loss, lse = linear_cross_entropy(hidden, weight, labels, bias=bias, return_lse=True, backend=backend, **options)
    assert loss.dtype == lse.dtype == torch.float32
    expected = linear_cross_entropy(exact[0], exact[1], labels, bias=exact[2], backend="reference", **options)
    torch.testing.assert_close(loss.double(), expected, rtol=near / 2, atol=0)
    for ours, theirs in zip(gradients(loss, hidden, weight, bias), gradients(expected, *exact), strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() < near * theirs.norm()


def test_where_the_head_is_frozen_the_hidden_states_still_get_their_gradient() -> None:
    hidden, weight, labels, _ = case()
    loss = linear_cross_entropy(hidden, weight.detach(), labels, backend="logits")
    expected = linear_cross_entropy(hidden, weight, labels, backend="reference")
    torch.testing.assert_close(gradients(loss, hidden), gradients(expected, hidden))


# --- any shape --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    shape=st.lists(st.integers(1, 4), max_size=3),
    width=st.integers(1, 6),
    size=st.integers(2, 12),
    smoothing=st.sampled_from([0.0, 0.1]),
    z_loss=st.sampled_from([0.0, 0.01]),
    scale=st.sampled_from([1.0, 0.5]),
    softcap=st.sampled_from([None, 5.0]),
    masked=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_for_any_shape_and_options_both_backends_give_the_sum_spelled_out(
    shape: list[int],
    width: int,
    size: int,
    smoothing: float,
    z_loss: float,
    scale: float,
    softcap: float | None,
    masked: bool,
    bias: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    hidden = torch.randn(*shape, width).double().requires_grad_()
    weight = torch.randn(size, width).double().requires_grad_()
    labels = torch.randint(1, size, shape)
    labels[torch.rand(shape) < 0.2] = -100
    added = torch.randn(size).double().requires_grad_() if bias else None
    options: dict[str, Any] = {
        "label_smoothing": smoothing,
        "z_loss": z_loss,
        "logit_scale": scale,
        "softcap": softcap,
        "mask_ids": [0] if masked else None,
    }
    expected = sum(by_hand(hidden, weight, labels, added, **options)[0])
    grads = []
    for backend in BACKENDS:
        loss = linear_cross_entropy(hidden, weight, labels, bias=added, reduction="sum", backend=backend, **options)
        assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
        grads.append(gradients(loss, hidden, weight, added))
    torch.testing.assert_close(grads[1], grads[0])


# --- cost and compilation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("options", "also"),
    [
        ({}, 0),
        ({"label_smoothing": 0.1, "z_loss": 0.01, "mask_ids": [0], "logit_scale": 0.5}, 0),
        ({"softcap": 3.0}, 0),  # tanh keeps what it gave
    ],
)
def test_for_the_backward_pass_only_the_logits_are_kept_of_all_that_is_as_large(
    dtype: torch.dtype, options: dict[str, Any], also: int
) -> None:
    rows, size = 16, 400
    hidden = torch.randn(rows, 4, dtype=dtype, requires_grad=True)
    weight = torch.randn(size, 4, dtype=dtype, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def large(backend: str) -> int:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            alive = linear_cross_entropy(hidden, weight, torch.randint(1, size, (rows,)), backend=backend, **options)
        assert alive.requires_grad
        return sum(bytes_ for bytes_ in kept.values() if bytes_ >= rows * size * dtype.itemsize)

    assert large("logits") == (1 + also) * rows * size * dtype.itemsize
    assert large("reference") >= large("logits")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[-1]])
def test_it_compiles_into_one_graph(backend: str, options: dict[str, Any]) -> None:
    hidden, weight, labels, bias = case()

    def loss_of(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return linear_cross_entropy(hidden, weight, labels, bias=bias, backend=backend, **options)

    torch.compiler.reset()
    compiled, plain = torch.compile(loss_of, fullgraph=True, backend="eager"), loss_of(hidden, weight, bias)
    loss = compiled(hidden, weight, bias)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(gradients(loss, hidden, weight, bias), gradients(plain, hidden, weight, bias))


# --- bad input --------------------------------------------------------------------------------------------------------

HIDDEN, WEIGHT, LABELS = torch.zeros(2, 3, D), torch.zeros(V, D), torch.ones(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": LABELS[:, :2]}, r"labels \(2, 2\) for hidden \(2, 3, 5\): expected \(2, 3\)"),
        ({"labels": torch.full((2, 3), V)}, "label 11: expected 0 to 10, or -100 where there is none"),
        ({"labels": torch.full((2, 3), -1)}, "label -1: expected 0 to 10"),
        ({"labels": LABELS.float()}, r"labels of torch\.float32: expected torch\.int64"),
        ({"labels": LABELS.int()}, r"labels of torch\.int32: expected torch\.int64"),
        ({"mask_ids": [4, 1]}, "label 1: is masked, so its loss would be infinite"),
        ({"mask_ids": [V]}, r"mask_ids has 11, and the head has 11 rows: expected 0 to 10"),
        ({"mask_ids": [-1]}, r"mask_ids has -1"),
        ({"weight": torch.zeros(V, D + 1)}, r"hidden \(2, 3, 5\) and weight \(11, 6\): .* expected \(\.\.\., D\)"),
        ({"weight": torch.zeros(V)}, r"weight \(11,\)"),
        ({"bias": torch.zeros(V - 1)}, r"bias \(10,\) for weight \(11, 5\): expected \(11,\)"),
        ({"bias": torch.zeros(1)}, r"bias \(1,\)"),
        ({"class_weight": torch.ones(V + 1)}, r"class_weight \(12,\): expected \(11,\)"),
        ({"reduction": "average"}, "reduction='average': expected 'mean', 'sum' or 'none'"),
        ({"backend": "fast"}, "backend='fast': expected one of auto, reference, logits"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5: expected 0 to 1"),
        ({"softcap": 0.0}, "softcap=0.0: expected more than 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS, **change}
    with pytest.raises(UsageError, match=words):
        linear_cross_entropy(**arguments)


def test_the_logits_alone_are_refused_the_same_way() -> None:
    with pytest.raises(UsageError, match=r"hidden \(2, 3, 5\) and weight \(11, 6\)"):
        linear_logits(HIDDEN, torch.zeros(V, D + 1))
