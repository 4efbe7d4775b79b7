"""What looks up in the head's matrix adds its gradient to the head's; and copies of a model are copies."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bowline.errors import UsageError
from bowline.nn.modules.tied_embedding import TiedEmbedding
from bowline.nn.modules.tied_loss import TiedLoss, use_tied_loss
from tests.nn.modules.tied_loss.cases import CONFIGS, IDS, V, built, logits_of, step, taken

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("quiet_transformers")


@pytest.mark.parametrize("name", CONFIGS)
def test_both_ends_have_one_gradient(name: str) -> None:
    model = built(name)
    assert not taken(model)
    lookups = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    kinds = [type(module) for module in lookups]
    with use_tied_loss(model):
        found = taken(model)
        assert set(found) == {model.get_output_embeddings().weight.grad.data_ptr()}
        assert len(found) == (2 if model.config.is_encoder_decoder else 1)
    assert [type(module) for module in lookups] == kinds
    assert not taken(model)


class Scaled(nn.Embedding):
    """As Gemma's and BART's: what its forward does with the rows stays."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(ids)


class Tiny(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table, self.positions, self.head = table, nn.Embedding(9, 4), nn.Linear(4, V, bias=False)
        self.head.weight = table.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = (self.table(input_ids) + self.positions(torch.arange(7))).tanh()
        logits = self.head(hidden)
        return Output(nn.functional.cross_entropy(logits.view(-1, V), labels.view(-1)), logits)


class Output(dict[str, Any]):
    def __init__(self, loss: torch.Tensor, logits: torch.Tensor) -> None:
        super().__init__(loss=loss, logits=logits)
        self.loss, self.logits = loss, logits


TABLES: dict[str, Callable[[], nn.Embedding]] = {
    "plain": lambda: nn.Embedding(V, 4),
    "with a padding row": lambda: nn.Embedding(V, 4, padding_idx=int(IDS[0, 0])),
    "scaled": lambda: Scaled(V, 4),
    "of bounded rows": lambda: nn.Embedding(V, 4, max_norm=0.5),
    "counting": lambda: nn.Embedding(V, 4, scale_grad_by_freq=True),
    "ours": lambda: TiedEmbedding(V, 4),
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("frozen", [False, True])
def test_every_table_looks_up_as_it_did(table: str, frozen: bool) -> None:
    torch.manual_seed(0)
    model = Tiny(TABLES[table]()).double()
    model.table.weight.requires_grad_(not frozen)
    kinds = [type(module) for module in model.modules()]
    plain, gradients = step(model)
    with use_tied_loss(model):
        assert type(model.positions) is nn.Embedding
        assert isinstance(model.table, TiedEmbedding)
        output, found = step(model)
    torch.testing.assert_close(output.loss, plain.loss, check_dtype=False, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(found, gradients, rtol=1e-6, atol=1e-9)
    assert [type(module) for module in model.modules()] == kinds


def test_an_untied_table_is_left_alone() -> None:
    model = Tiny(nn.Embedding(V, 4))
    model.head.weight = nn.Parameter(torch.randn(V, 4))
    with use_tied_loss(model):
        assert type(model.table) is nn.Embedding


def test_a_lookup_that_something_else_has_changed_since_is_named() -> None:
    model = Tiny(nn.Embedding(V, 4))
    loss = use_tied_loss(model)
    ours = type(model.table)
    model.table.__class__ = Scaled
    with pytest.raises(UsageError, match="a lookup has the class Scaled now"):
        loss.remove()
    assert type(model.head) is not nn.Linear
    model.table.__class__ = ours
    loss.remove()
    assert type(model.table) is nn.Embedding


def test_a_lookup_may_have_a_forward_that_others_put_on_it() -> None:
    """As accelerate does, which moves what goes in and out."""
    model = built("GPT2LMHeadModel")
    plain, gradients = step(model)
    table = model.get_input_embeddings()
    own = table.forward
    table.forward = lambda ids: own(ids)
    with use_tied_loss(model):
        output, found = step(model)
    torch.testing.assert_close(output.loss, plain.loss, check_dtype=False, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-7)
    assert type(table) is nn.Embedding


def through_a_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BartForConditionalGeneration"])
def test_a_copy_computes_with_its_own_matrix(name: str, copied: Any) -> None:
    model = built(name)
    use_tied_loss(model, backend="chunked")
    plain, gradients = step(model)
    other = copied(model)
    assert other.get_output_embeddings().loss_backend == "chunked"
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    output, found = step(other)
    assert torch.equal(output.loss, plain.loss)
    torch.testing.assert_close(found, gradients, rtol=0.0, atol=0.0)
    assert logits_of(output)._made is None
    assert len(taken(other)) == len(taken(model)) > 0


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
def test_of_a_copy_it_is_taken_off_by_the_copy(copied: Any) -> None:
    """What was returned for the model it is a copy of takes it off that one."""
    model = built("BartForConditionalGeneration")
    kinds = [type(module) for module in model.modules()]
    loss = use_tied_loss(model)
    other = copied(model)
    with pytest.raises(UsageError) as refused:
        use_tied_loss(other)
    assert "TiedLoss.of(model).remove()" in str(refused.value.help)
    TiedLoss.of(other).remove()
    assert [type(module) for module in other.modules()] == kinds
    assert logits_of(model(IDS))._made is None
    with pytest.raises(UsageError, match="a head without use_tied_loss's class"):
        TiedLoss.of(other)
    TiedLoss.of(model).remove()
    loss.remove()  # nothing is left to do
    assert [type(module) for module in model.modules()] == kinds


class Two(nn.Module):
    """Of whose heads one is the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = built("GPT2LMHeadModel"), built("GPT2LMHeadModel")

    def get_output_embeddings(self) -> nn.Module:
        head: nn.Module = self.a.lm_head
        return head


def test_of_two_heads_it_is_taken_off_the_models() -> None:
    both = Two()
    use_tied_loss(both.a)
    use_tied_loss(both.b)
    kinds = [type(module) for module in both.b.modules()]
    TiedLoss.of(both).remove()
    assert type(both.a.lm_head) is nn.Linear and type(both.a.transformer.wte) is nn.Embedding
    assert [type(module) for module in both.b.modules()] == kinds


class Locked(nn.Embedding):
    """Of which a part is no part of a copy."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "lock"}


def test_a_copy_has_what_a_module_says_is_its_state() -> None:
    model = built("GPT2LMHeadModel")
    locked = Locked(V, 16, _weight=model.lm_head.weight)
    locked.weight = model.lm_head.weight
    locked.lock = threading.Lock()  # type: ignore[assignment]
    model.transformer.wte = locked
    use_tied_loss(model)
    assert not hasattr(copy.deepcopy(model).transformer.wte, "lock")


def test_a_replica_computes_with_its_own_matrix() -> None:
    """As DataParallel's, which holds on each device a tensor in the place of the parameter."""
    model = Tiny(nn.Embedding(V, 4))
    use_tied_loss(model)
    replica = model.head._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(V, 4), None
    assert not replica(torch.ones(2, 4)).made().any()
