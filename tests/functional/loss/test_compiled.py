"""Under `torch.compile` the chunked loss is one operator, with the same results and cost as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bowline.errors import UsageError
from bowline.functional.loss import compiled_operator, linear_cross_entropy, resources
from bowline.functional.loss.chunks.chunk_loop import run_job
from bowline.functional.loss.chunks.loss_job import LossJob
from tests.functional.loss.cases import OPTIONS, V, case, gradients

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"  # torch's own, while it traces
)
COMPILE: dict[str, Any] = {"fullgraph": True, "backend": "aot_eager"}


@pytest.fixture(autouse=True)
def forgotten() -> None:
    torch.compiler.reset()


def compiled(**options: Any) -> Any:
    def loss(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        bias: torch.Tensor | None,
        class_weight: torch.Tensor | None,
    ) -> torch.Tensor:
        found: torch.Tensor = linear_cross_entropy(
            hidden * 1.0, weight, labels, bias=bias, class_weight=class_weight, backend="chunked", **options
        )
        return found

    return torch.compile(loss, **COMPILE)


def jobs_of(monkeypatch: pytest.MonkeyPatch) -> list[LossJob]:
    """The jobs of the operator, one for each run."""
    jobs: list[LossJob] = []

    def noted(job: LossJob, *, skip: bool) -> Any:
        jobs.append(job)
        return run_job(job, skip=skip)

    monkeypatch.setattr(compiled_operator, "run_job", noted)
    return jobs


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_and_gradients_are_the_same(reduction: Any, dtype: torch.dtype, options: dict[str, Any]) -> None:
    ends = case(dtype=dtype)
    hidden, weight, labels, bias = ends
    factors = torch.rand(V, dtype=dtype, requires_grad=dtype == torch.float64)
    plain = linear_cross_entropy(
        hidden,
        weight,
        labels,
        bias=bias,
        class_weight=factors,
        reduction=reduction,
        backend="chunked",
        **options,
    )
    found = compiled(reduction=reduction, **options)(*ends, factors)
    leaves = (hidden, weight, bias, factors if factors.requires_grad else None)
    torch.testing.assert_close(found, plain)
    for one, other in zip(gradients(found / 3, *leaves), gradients(plain / 3, *leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6 if dtype == torch.float64 else 0.0, atol=0.0)


@pytest.mark.parametrize("without", ["hidden", "weight", "bias", "no bias", "grad"])
def test_only_what_is_wanted_is_made(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels, bias = case(bias=without != "no bias")
    ends = {"hidden": hidden, "weight": weight, "bias": bias}
    if without in ends:
        ends[without].requires_grad_(False)  # type: ignore[union-attr]
    jobs = jobs_of(monkeypatch)
    with torch.set_grad_enabled(without != "grad"):
        found = compiled()(hidden, weight, labels, bias, None)
    kept = [one is not None and one.requires_grad and without != "grad" for one in ends.values()]
    assert [[job.wanted.hidden, job.wanted.weight, job.wanted.bias] for job in jobs] == [kept]
    assert found.requires_grad == any(kept)


def test_under_autocast_a_float32_matrix_has_a_float32_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a CPU emulates bfloat16, the loss multiplies in float32 if it is not compiled: here in bfloat16 too."""
    monkeypatch.setattr("bowline.functional.loss.cross_entropy.emulated", lambda _: False)
    hidden, weight, labels, bias = case(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = compiled()(hidden, weight, labels, bias, None)
        plain = linear_cross_entropy(hidden, weight, labels, bias=bias, backend="chunked")
    for one, other in zip(gradients(found, hidden, weight), gradients(plain, hidden, weight), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other)


def test_a_number_of_tokens_that_changes_is_one_graph() -> None:
    graphs: list[Any] = []

    def counting(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    loss = torch.compile(
        lambda *ends: linear_cross_entropy(*ends, backend="chunked"), fullgraph=True, dynamic=True, backend=counting
    )
    for rows in (4, 7, 12):
        hidden, weight, labels, _ = case(rows)
        found: torch.Tensor = loss(hidden, weight, labels)
        torch.testing.assert_close(found, linear_cross_entropy(hidden, weight, labels, backend="reference"))
    assert len(graphs) == 1


def test_what_is_allowed_and_what_is_a_label_is_looked_at_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels, bias = case()
    loss = compiled()
    loss(hidden, weight, labels, bias, None)
    jobs = jobs_of(monkeypatch)
    with resources(budget=12345):
        loss(hidden, weight, labels, bias, None)
    assert jobs[0].allowed.budget == 12345
    with pytest.raises(UsageError, match=f"label 77: expected 0 to {V - 1}"):
        loss(hidden, weight, labels.clamp(min=77), bias, None)


def test_asked_for_more_than_a_number_or_exported_it_is_torchs_own_operators() -> None:
    hidden, weight, labels, _ = case()

    class Head(torch.nn.Module):
        def forward(self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Any:
            return linear_cross_entropy(hidden, weight, labels, backend="chunked")

    graph = torch.export.export(Head(), (hidden, weight, labels)).graph
    assert not [node for node in graph.nodes if "bowline" in str(node.target)]
    losses = torch.compile(
        lambda *ends: linear_cross_entropy(*ends, backend="chunked", reduction="none"),
        **COMPILE,
    )
    plain = linear_cross_entropy(hidden, weight, labels, backend="reference", reduction="none")
    torch.testing.assert_close(losses(hidden, weight, labels), plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_operator_says_of_its_results_what_is_true(dtype: torch.dtype) -> None:
    """torch's own check: shapes, dtypes and strides of what it is traced with, and that it changes no argument."""
    hidden, weight, labels, bias = (one.detach() for one in case(6, dtype=dtype) if one is not None)
    options: dict[str, Any] = {
        "logit_scale": 1.0,
        "softcap": None,
        "ignore_index": -100,
        "label_smoothing": 0.0,
        "z_loss": 0.0,
        "mask_ids": [],
    }
    factors = torch.ones(6, dtype=torch.promote_types(dtype, torch.float32))
    for transposed in (weight, weight.t().contiguous().t()):
        for wanted, shrink in (([True] * 3, None), ([False, True, False], torch.tensor(0.5))):
            arguments = (hidden, transposed, bias, labels, factors, shrink, wanted)
            torch.library.opcheck(torch.ops.bowline.chunked_loss.default, arguments, options)


def test_factors_get_their_gradient_in_float16_too() -> None:
    found = []
    for dtype in (torch.float16, torch.float64):
        *ends, bias = case(dtype=dtype)
        factors = torch.linspace(0.5, 1, V, dtype=dtype).requires_grad_()
        found += gradients(compiled()(*ends, bias, factors) / 3, factors)
    torch.testing.assert_close(found[0].double(), found[1], rtol=0.01, atol=1e-3)
