"""Under torch.compile the body is a graph, from behind the lookup to before the head: there are no logits in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bowline.functional.deferred import DeferredLogits
from bowline.nn.modules.tied_loss import use_tied_loss
from tests.nn.modules.tied_loss.cases import IDS, V, built, logits_of, step, taken

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("quiet_transformers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # torch's own, while it traces
]
T5 = pytest.param("T5ForConditionalGeneration", marks=pytest.mark.thorough)
BART = pytest.param("BartForConditionalGeneration", marks=pytest.mark.thorough)
NAMES = ["GPT2LMHeadModel", "BertForPreTraining", T5, "Gemma2ForCausalLM"]


@pytest.fixture(autouse=True)
def forgotten() -> None:
    torch.compiler.reset()


class Graphs:
    """A backend that counts the operations of each graph that it is given."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.sizes.append(len(graph.graph.nodes))
        return graph


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_those_of_the_model_as_it_was(name: str) -> None:
    model = built(name, layers=6)
    plain, gradients = step(model)
    graphs = Graphs()
    with use_tied_loss(model):
        compiled: Any = torch.compile(model, backend=graphs)
        output, found = step(model, compiled)
        assert isinstance(logits_of(output), DeferredLogits)
        assert logits_of(output)._made is None, "the loss was computed from the logits"
    torch.testing.assert_close(output.loss, plain.loss, check_dtype=False, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-7)
    bodies = sorted(graphs.sizes)[-2 if model.config.is_encoder_decoder else -1 :]
    assert sum(bodies) > 0.8 * sum(graphs.sizes), f"the body is not one graph, or an encoder's and one: {graphs.sizes}"


@pytest.mark.parametrize("name", [*NAMES, BART])
def test_both_ends_have_one_gradient(name: str) -> None:
    model = built(name)
    use_tied_loss(model)
    compiled: Any = torch.compile(model, backend="aot_eager")
    found = taken(model, compiled)
    assert set(found) == {model.get_output_embeddings().weight.grad.data_ptr()}
    assert len(found) == (2 if model.config.is_encoder_decoder else 1)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_lookup_that_learns_nothing_is_in_the_bodys_graph(frozen: bool) -> None:
    model = built("GPT2LMHeadModel")
    use_tied_loss(model)
    model.transformer.wte.weight.requires_grad_(not frozen)
    graphs = Graphs()
    compiled: Any = torch.compile(model, backend=graphs)
    with torch.set_grad_enabled(frozen):
        compiled(IDS)
    assert graphs.sizes[0] == max(graphs.sizes)


def test_a_second_step_compiles_nothing() -> None:
    model = built("LlamaForCausalLM").float()
    use_tied_loss(model)
    compiled: Any = torch.compile(model, backend="aot_eager")
    first, _ = step(model, compiled)
    with torch.compiler.set_stance("fail_on_recompile"):
        again, _ = step(model, compiled)
    assert torch.equal(first.loss, again.loss)
    assert again.logits._made is None


def test_a_whole_step_may_be_what_is_compiled() -> None:
    model = built("GPT2LMHeadModel")
    plain, gradients = step(model)
    use_tied_loss(model)

    @torch.compile(backend="aot_eager")
    def loss_of(ids: torch.Tensor) -> Any:
        return 2 * model(input_ids=ids, labels=ids).loss

    model.zero_grad()
    loss = loss_of(IDS)
    loss.backward()
    torch.testing.assert_close(loss, 2 * plain.loss, check_dtype=False, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(model.lm_head.weight.grad, 2 * gradients["transformer.wte.weight"])


def test_logits_that_are_asked_for_are_there() -> None:
    model = built("GPT2LMHeadModel")
    expected = model(IDS).logits
    use_tied_loss(model)
    compiled: Any = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(IDS).logits + 0, expected)
    torch.testing.assert_close(compiled(IDS).logits.softmax(-1), expected.softmax(-1))


def test_what_has_to_be_one_graph_has_the_logits() -> None:
    model = built("LlamaForCausalLM").float()
    plain, gradients = step(model)
    use_tied_loss(model)
    graphs = Graphs()
    compiled: Any = torch.compile(model, backend=graphs, fullgraph=True)
    output, found = step(model, compiled)
    assert len(graphs.sizes) == 1
    assert type(output.logits) is torch.Tensor
    torch.testing.assert_close(output.loss, plain.loss)
    torch.testing.assert_close(found, gradients)


@pytest.mark.parametrize("strict", [True, False])
def test_an_export_has_the_logits(strict: bool) -> None:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.head = nn.Embedding(V, 4), nn.Linear(4, V, bias=False)
            self.head.weight = self.wte.weight

        def get_output_embeddings(self) -> nn.Module:
            return self.head

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(self.wte(ids))
            return logits

    model = Tiny()
    expected = model(IDS)
    use_tied_loss(model)
    exported = torch.export.export(model, (IDS,), strict=strict)
    assert torch.equal(exported.module()(IDS), expected)
