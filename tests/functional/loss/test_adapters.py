"""The loss of a head with adapters: a thin product is added to its logits, and some tokens' logits are replaced.

The expected values are torch's own, from all logits in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from bowline.errors import UsageError
from bowline.functional.loss import AdapterTerms, linear_cross_entropy, linear_logits
from tests.functional.loss.cases import OPTIONS, D, V, case

R, IDS = 3, [4, 7, 8, 10]
KINDS = ["low rank", "columns", "both"]
NAMES = ("left", "right", "columns")


def terms(lead: tuple[int, ...], kind: str, dtype: torch.dtype = torch.float64, size: int = V) -> AdapterTerms:
    torch.manual_seed(1)
    left, right, columns = (
        torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((*lead, R), (size, R), (*lead, len(IDS)))
    )
    return AdapterTerms(
        **({} if kind == "columns" else {"left": left, "right": right}),
        **({} if kind == "low rank" else {"ids": torch.tensor(IDS), "columns": columns}),
    )


def by_torch(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    its: AdapterTerms,
    options: dict[str, Any],
) -> torch.Tensor:
    """The mean of -log p[label] + z lse², of all logits."""
    x = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    if its.left is not None and its.right is not None:
        x = x + its.left @ its.right.T
    if its.columns is not None:
        x = torch.cat([its.columns[..., IDS.index(v), None] if v in IDS else x[..., v, None] for v in range(V)], -1)
    x = x * options.get("logit_scale", 1.0)
    if cap := options.get("softcap"):
        x = cap * torch.tanh(x / cap)
    masked = options.get("mask_ids", [])
    x, flat = x.reshape(-1, V), labels.reshape(-1)
    kept = [v for v in range(V) if v not in masked]
    lse = x[:, kept].logsumexp(-1)
    target = x.gather(1, flat.clamp(min=0)[:, None])[:, 0]
    smoothing = options.get("label_smoothing", 0.0)
    losses = lse - (1 - smoothing) * target - smoothing * x[:, kept].mean(-1) + options.get("z_loss", 0.0) * lse**2
    mean: torch.Tensor = losses[flat != -100].mean()
    return mean


def leaves(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    return [one for one in tensors if one is not None and one.requires_grad]


@pytest.mark.parametrize("backend", ["reference", "logits", "chunked"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_the_loss_and_every_gradient_are_torchs(backend: str, kind: str, options: dict[str, Any], bias: bool) -> None:
    hidden, weight, labels, added = case(bias=bias)
    its = terms((2, 4), kind)
    mine = leaves(hidden, weight, added, its.left, its.right, its.columns)
    expected = by_torch(hidden, weight, labels, added, its, options)
    wanted = torch.autograd.grad(expected, mine)
    found = linear_cross_entropy(hidden, weight, labels, bias=added, adapters=its, backend=backend, **options)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, mine), wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["losses", "lse", "twice"])
def test_each_positions_loss_its_lse_and_a_second_backward_pass_too(kind: str, name: str) -> None:
    hidden, weight, labels, bias = case()
    its = terms((2, 4), kind)
    mine = leaves(hidden, weight, bias, its.left, its.right, its.columns)

    def computed(backend: str) -> list[torch.Tensor]:
        options: dict[str, Any] = (
            {"reduction": "mean"} if name == "twice" else {"reduction": "none", "return_lse": True}
        )
        found = linear_cross_entropy(hidden, weight, labels, bias=bias, adapters=its, backend=backend, **options)
        if name == "twice":
            torch.autograd.grad(found, mine, retain_graph=True)
            return list(torch.autograd.grad(3 * found, mine))
        factor = torch.linspace(0.5, 2, 8, dtype=torch.float64).view(2, 4)
        ((found[0] if name == "losses" else found[1]) * factor).sum()
        return list(torch.autograd.grad((found[0 if name == "losses" else 1] * factor).sum(), mine))

    torch.testing.assert_close(computed("chunked"), computed("reference"))


@pytest.mark.parametrize("rows", [1, 40, 300, 1100])
@pytest.mark.parametrize("frozen", [False, True])
def test_many_chunks_and_a_head_that_does_not_learn(rows: int, frozen: bool) -> None:
    """As a LoRA trains it: the head is frozen, and only the adapter's tensors get gradients."""
    torch.manual_seed(2)
    size = 1003
    hidden, weight = torch.randn(rows, D).requires_grad_(), torch.randn(size, D).requires_grad_(not frozen)
    labels = torch.randint(0, size, (rows,))
    labels[::5], labels[1::3] = 7, -100
    its = terms((rows,), "both", torch.float32, size)
    mine = leaves(hidden, weight, its.left, its.right, its.columns)
    found = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, adapters=its, backend="chunked"), mine)
    wide = [one.double() for one in (hidden, weight)]
    exact = AdapterTerms(
        **{name: getattr(its, name).double() for name in NAMES},
        ids=its.ids,
    )
    loss = F.cross_entropy(exact.applied(wide[0] @ wide[1].T), labels)
    for one, other in zip(found, torch.autograd.grad(loss, mine), strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_adapters_on_a_head_in_half_precision(dtype: torch.dtype) -> None:
    """As peft keeps them by default; no further from float64 than torch's own way with all logits."""
    torch.manual_seed(3)
    size, rows = 500, 64
    hidden, weight = (torch.randn(n, 32).to(dtype).requires_grad_() for n in (rows, size))
    labels = torch.randint(0, size, (rows,))
    its = terms((rows,), "low rank", torch.float32, size)
    mine = leaves(hidden, its.left, its.right)

    def error(found: Any) -> list[float]:
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    assert its.left is not None
    assert its.right is not None
    logits = hidden.double() @ weight.double().T + its.left.double() @ its.right.double().T
    exact = [one.double() for one in torch.autograd.grad(F.cross_entropy(logits, labels), mine)]
    eager = F.cross_entropy((hidden @ weight.T + its.left @ its.right.T).float(), labels)
    ours = linear_cross_entropy(hidden, weight, labels, adapters=its, backend="chunked")
    for one, other in zip(error(torch.autograd.grad(ours, mine)), error(torch.autograd.grad(eager, mine)), strict=True):
        assert one < 1.5 * other + 1e-3


def test_the_logits_are_those_of_the_loss() -> None:
    hidden, weight, labels, bias = case()
    its = terms((2, 4), "both")
    logits = linear_logits(hidden, weight, bias=bias, adapters=its)
    _, returned = linear_cross_entropy(hidden, weight, labels, bias=bias, adapters=its, return_logits=True)
    torch.testing.assert_close(logits, returned)
    assert torch.equal(logits[..., IDS], its.columns)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"left": torch.zeros(2, 4, R)}, "expected left with right, columns with ids"),
        ({"left": torch.zeros(2, 3, R), "right": torch.zeros(V, R)}, r"adapters.left \(2, 3, 3\) for hidden"),
        ({"left": torch.zeros(2, 4, R), "right": torch.zeros(R, V)}, r"adapters.right \(3, 11\): expected \(11, 3\)"),
        ({"columns": torch.zeros(2, 4, 2), "ids": torch.tensor([1])}, r"adapters.ids \(1,\): expected \(2,\)"),
    ],
)
def test_terms_that_do_not_fit_are_refused(changed: dict[str, Any], message: str) -> None:
    hidden, weight, labels, _ = case()
    with pytest.raises(UsageError, match=message):
        linear_cross_entropy(hidden, weight, labels, adapters=AdapterTerms(**changed))


def test_a_backend_without_adapters_says_so() -> None:
    hidden, weight, labels, _ = case()
    with pytest.raises(UsageError, match="backend='torch' has no adapters"):
        linear_cross_entropy(hidden, weight, labels, adapters=terms((2, 4), "both"), backend="torch")
