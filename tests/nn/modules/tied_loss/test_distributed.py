"""Two processes on gloo: a model under DDP and FSDP2 has the gradients that it had, and makes no logits for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.nn.modules.tied_loss.workers import FREED, KINDS
from tests.processes import of_two_processes

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """Of each process, by kind, whether tied, and where the loss is: without `use_tied_loss`, and with it."""
    return of_two_processes("tests.nn.modules.tied_loss.workers", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "fsdp, the head a unit"])
def test_a_loss_in_the_model_makes_no_logits(kind: str, tied: bool, results: list[dict[Any, Any]]) -> None:
    for result in results:
        plain, ours = result[kind, tied, "in the model"]
        assert ours["made"] == 0
        same(ours, plain)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in FREED])
def test_a_loss_outside_has_gradients_that_are_reduced(kind: str, tied: bool, results: list[dict[Any, Any]]) -> None:
    for result in results:
        plain, ours = result[kind, tied, "outside"]
        same(ours, plain)


@pytest.mark.parametrize(("kind", "where"), [(FREED[0], "outside"), (FREED[1], "outside"), (FREED[1], "in the model")])
def test_a_matrix_that_is_freed_before_the_loss_is_named(kind: str, where: str, results: list[dict[Any, Any]]) -> None:
    for result in results:
        plain, ours = result[kind, False, where]
        assert "refused" not in plain
        assert "was freed after the head's forward pass" in ours["refused"]


def same(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    torch.testing.assert_close(ours["losses"], plain["losses"], rtol=1e-6, atol=0.0)
    for name, gradient in plain["gradients"].items():
        torch.testing.assert_close(ours["gradients"][name], gradient, rtol=1e-4, atol=1e-7)
