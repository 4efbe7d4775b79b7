"""`use_tied_loss`: the losses and gradients of the model as it was, without its logits; and the model itself again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.errors import UsageError
from bowline.functional.deferred import DeferredLogits, Product
from bowline.nn import find_ties
from bowline.nn.modules.tied_loss import use_tied_loss
from tests.nn.modules.tied_loss.cases import CONFIGS, IDS, V, built, logits_of, step

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("quiet_transformers")


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_every_gradient_are_those_of_the_model_as_it_was(name: str) -> None:
    model = built(name)
    plain, gradients = step(model)
    with use_tied_loss(model):
        output, found = step(model)
        assert isinstance(logits_of(output), DeferredLogits)
        assert logits_of(output)._made is None, "the loss was computed from the logits"
        torch.testing.assert_close(output.loss, plain.loss, check_dtype=False, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-7)  # transformers casts logits to float32
        torch.testing.assert_close(logits_of(output) + 0, logits_of(plain), check_dtype=False)
    after, again = step(model)
    assert type(logits_of(after)) is torch.Tensor
    assert all(torch.equal(again[key], gradients[key]) for key in gradients)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "T5ForConditionalGeneration", "Gemma2ForCausalLM"])
def test_generation_says_what_it_said(name: str) -> None:
    model = built(name).float()
    for beams in (1, 2):
        options = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams}
        plain = model.generate(IDS[:, :3], **options)
        with use_tied_loss(model):
            assert torch.equal(model.generate(IDS[:, :3], **options), plain)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("smoothing", "backend"), [(0.0, None), (0.1, None), (0.0, "aot_eager")])
def test_trainer_takes_twenty_steps_to_the_same_losses_and_evaluates(
    smoothing: float, backend: str | None, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    ids = torch.randint(3, V, (80, 7), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in ids]

    def losses(model: Any, place: Path) -> list[float]:
        options = transformers.TrainingArguments(
            output_dir=str(place),
            max_steps=20,
            per_device_train_batch_size=4,
            label_smoothing_factor=smoothing,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            torch_compile_backend=backend,  # which asks for torch.compile
        )
        trainer = transformers.Trainer(model=model, args=options, train_dataset=rows, eval_dataset=rows[:8])
        trainer.train()
        found = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        return [*found, trainer.evaluate()["eval_loss"]]

    model = built("GPT2LMHeadModel").float()
    other = copy.deepcopy(model)
    use_tied_loss(other)
    expected = losses(model, tmp_path / "a")
    with patch.object(Product, "cross_entropy", autospec=True, side_effect=Product.cross_entropy) as computed:
        found = losses(other, tmp_path / "b")
    assert computed.call_count >= (0 if smoothing else 20), "its own smoothing takes the logits"
    assert len(found) == 21
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)
    assert len(find_ties(other).ties) == 1


def test_under_autocast_the_product_is_in_half_precision_as_it_was() -> None:
    model = built("LlamaForCausalLM").float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain, gradients = step(model)
        with use_tied_loss(model):
            output, found = step(model)
            assert output.logits.dtype == plain.logits.dtype
    torch.testing.assert_close(output.loss, plain.loss, rtol=1e-3, atol=0.0)
    for key, gradient in gradients.items():
        assert (found[key] - gradient).norm() <= 2e-2 * gradient.norm() + 1e-4, key


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "Gemma2ForCausalLM"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_loss_inside_or_outside_of_autocast_is_that_of_the_logits_the_model_would_have_had(
    name: str, inside: bool
) -> None:
    """They were made under it; what comes after has the dtype that torch gives it."""
    model = built(name).float()

    def loss_of() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=IDS).logits
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            return F.cross_entropy(logits.view(-1, V), IDS.view(-1))

    plain = loss_of()
    with use_tied_loss(model):
        found = loss_of()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=IDS).logits
        made = logits.float().clone()  # here, outside, and as they would have been inside
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(made, model(input_ids=IDS).logits.float())
    assert found.dtype == plain.dtype
    torch.testing.assert_close(found, plain, rtol=1e-2, atol=0.0)


def test_hidden_states_in_half_precision_have_a_loss_after_autocast_has_ended() -> None:
    """A product of the two dtypes would be an error there."""
    table = nn.Embedding(V, 16)
    body, head = nn.Linear(16, 16), nn.Linear(16, V, bias=False)
    head.weight = table.weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = body(table(IDS))
    assert hidden.dtype == torch.bfloat16
    product = Product(hidden, head.weight, None, torch.bfloat16, torch.bfloat16)
    deferred: Any = DeferredLogits(product)
    loss = F.cross_entropy(deferred.view(-1, V), IDS.view(-1))
    expected = F.cross_entropy(product.logits().view(-1, V), IDS.view(-1))
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0.0)


def test_a_float32_bias_of_zeros_under_autocast_costs_the_loss_nothing() -> None:
    """BART's `final_logits_bias`: what was narrowed is float32 again; of another bias the logits are computed."""
    model = built("BartForConditionalGeneration").float()
    for bias in (torch.zeros(1, V), torch.linspace(20, 23, V)[None]):
        model.final_logits_bias.copy_(bias)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            plain = model(input_ids=IDS, labels=IDS)
            with use_tied_loss(model):
                output = model(input_ids=IDS, labels=IDS)
                assert (output.logits._made is None) == (not bias.any()) if is_deferred(output.logits) else bias.any()
        assert output.logits.dtype == plain.logits.dtype == torch.float32
        torch.testing.assert_close(output.loss, plain.loss, rtol=1e-3, atol=0.0)
        torch.testing.assert_close(output.logits + 0, plain.logits)


def is_deferred(logits: Any) -> bool:
    return isinstance(logits, DeferredLogits)


@pytest.mark.filterwarnings("ignore")
def test_a_parametrized_matrix_is_computed_once_a_step() -> None:
    """As spectral_norm, each of whose looks at it is a step of its power iteration."""
    model = built("GPT2LMHeadModel")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    looks: list[int] = []

    class Noted(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            looks.append(1)
            return weight * 1.0

    with use_tied_loss(model):
        torch.nn.utils.parametrize.register_parametrization(model.lm_head, "weight", Noted(), unsafe=True)
        looks.clear()
        model(input_ids=IDS, labels=IDS)
        assert len(looks) == 1
        torch.nn.utils.parametrize.remove_parametrizations(model.lm_head, "weight")


def calls_of_other_kinds() -> dict[str, Any]:
    def call(model: Any, parameters: Any, ids: torch.Tensor = IDS) -> Any:
        return torch.func.functional_call(
            model, parameters, (ids,), {"labels": ids, "use_cache": False, "attention_mask": torch.ones_like(ids)}
        ).loss

    def of_each_text(model: Any, parameters: Any) -> Any:
        one = torch.func.grad(lambda given, ids: call(model, given, ids[None]))
        return torch.func.vmap(one, (None, 0))(parameters, IDS)

    def forward_mode(model: Any, parameters: Any) -> Any:
        with forward_ad.dual_level():
            rows = model.transformer.wte(IDS).detach()
            dual = forward_ad.make_dual(rows, torch.ones_like(rows))
            return forward_ad.unpack_dual(model(inputs_embeds=dual, use_cache=False).logits * 1.0).tangent

    return {
        "torch.func.grad": lambda model, parameters: torch.func.grad(lambda given: call(model, given))(parameters),
        "vmap": of_each_text,
        "forward mode": forward_mode,
    }


@pytest.mark.parametrize("kind", calls_of_other_kinds())
def test_other_kinds_of_differentiation_are_torchs_own(kind: str) -> None:
    config = transformers.GPT2Config(vocab_size=V, **CONFIGS["GPT2LMHeadModel"], attn_implementation="eager")
    model: Any = transformers.GPT2LMHeadModel(config).double().eval()
    parameters = {name: one.detach() for name, one in model.named_parameters()}
    plain = calls_of_other_kinds()[kind](model, parameters)
    with use_tied_loss(model):
        torch.testing.assert_close(calls_of_other_kinds()[kind](model, parameters), plain)


def test_on_no_device_there_are_shapes() -> None:
    model = built("GPT2LMHeadModel").to("meta")
    with use_tied_loss(model):
        assert model(IDS.to("meta")).logits.shape == (2, 7, V)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_hidden_states_of_no_width_have_logits_in_every_shape() -> None:
    model = Headless()
    head = nn.Linear(0, V)
    model.get_output_embeddings = lambda: head  # type: ignore[assignment]
    with use_tied_loss(model):
        logits = head(torch.zeros(2, 3, 0)).view(-1, V)
        expected = head.bias.expand(6, V)
        assert torch.equal(F.cross_entropy(logits, IDS[0, :6]), F.cross_entropy(expected, IDS[0, :6]))


def test_float64_is_not_cast() -> None:
    model, hidden = built("GPT2LMHeadModel"), torch.randn(3, 16).double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model.lm_head(hidden)
        with use_tied_loss(model):
            found = model.lm_head(hidden)
        assert isinstance(found, DeferredLogits)
        assert found.dtype == plain.dtype == torch.float64
        assert torch.equal(found + 0, plain)


def test_weights_names_and_files_are_untouched(tmp_path: Path) -> None:
    model = built("GPT2LMHeadModel")
    names = list(model.state_dict())
    use_tied_loss(model)
    assert list(model.state_dict()) == names
    assert model.lm_head.weight is model.transformer.wte.weight
    model.save_pretrained(tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(again(IDS).logits, model(IDS).logits + 0)


# --- what cannot be, and what was there before ----------------------------------------------------------------------


def test_it_is_put_on_once_and_taken_off_in_order() -> None:
    model = built("GPT2LMHeadModel")
    kinds = [type(module) for module in model.modules()]
    loss = use_tied_loss(model)
    with pytest.raises(UsageError, match="has use_tied_loss's forward already"):
        use_tied_loss(model)
    mine = model.lm_head.forward
    model.lm_head.forward = lambda hidden: mine(hidden)
    with pytest.raises(UsageError, match="the head has a forward now, which is not use_tied_loss's"):
        loss.remove()
    del model.lm_head.forward
    loss.remove()
    with use_tied_loss(model):
        loss.remove()  # for the second time: nothing happens
        assert model(IDS).logits.made() is not None
    assert [type(module) for module in model.modules()] == kinds
    model.lm_head.forward = mine
    with pytest.raises(UsageError, match="has a forward of its own already"):
        use_tied_loss(model)


class Headless(nn.Module):
    def get_output_embeddings(self) -> None:
        return None


@pytest.mark.parametrize(
    ("model", "told"), [(Headless(), "has no head, expected a torch.nn.Linear"), (nn.Linear(2, 3), "no get_output")]
)
def test_a_model_without_a_linear_head_is_refused(model: nn.Module, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        use_tied_loss(model)
    with pytest.raises(UsageError, match="expected"):
        use_tied_loss("gpt2")  # type: ignore[arg-type]


def test_a_backend_that_is_none_is_refused_at_once() -> None:
    model = built("GPT2LMHeadModel")
    with pytest.raises(UsageError, match="backend='fast': expected one of auto, reference"):
        use_tied_loss(model, backend="fast")
    assert type(model.lm_head) is nn.Linear


class Another(torch.Tensor):
    """As DTensor, which knows more of a product than we do."""


def test_hidden_states_of_another_class_have_logits_of_theirs() -> None:
    model = built("GPT2LMHeadModel").float()
    hidden = torch.ones(2, 16)
    expected = model.lm_head(hidden)
    use_tied_loss(model)
    found = model.lm_head(hidden.as_subclass(Another))
    assert type(found) is Another
    assert torch.equal(found.as_subclass(torch.Tensor), expected)


class Scaled(nn.Linear):
    """As Idefics' head, of which `weight` is not the whole."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden)


def test_a_linear_that_does_more_than_a_linear_is_refused() -> None:
    model = built("GPT2LMHeadModel")
    model.lm_head = Scaled(16, V)
    with pytest.raises(UsageError, match="is a Scaled, which has a forward of its own"):
        use_tied_loss(model)
    assert type(model.lm_head) is Scaled


def test_a_head_whose_weight_is_computed_or_quantised_is_refused() -> None:
    computed, quantised = built("GPT2LMHeadModel"), built("GPT2LMHeadModel")
    computed.lm_head = nn.utils.parametrizations.weight_norm(nn.Linear(16, V, bias=False))
    quantised.lm_head.weight = nn.Parameter(torch.zeros(V, 16, dtype=torch.int8), requires_grad=False)
    for model in (computed, quantised):
        with pytest.raises(UsageError, match=r"expected a torch\.nn\.Linear with a floating-point weight"):
            use_tied_loss(model)
