"""`use_tied_loss` and PEFT: whatever the order, every loss and gradient is PEFT's own, without logits in memory."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from bowline.errors import UsageError
from bowline.nn import TiedLoss, use_tied_loss
from tests.nn.modules.tied_loss.cases import IDS, V, built, logits_of, step

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*tied.*:UserWarning", "ignore:.*tie_word_embeddings.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # dynamo's, of a saved tensor
]

ENDS = {
    "GPT2LMHeadModel": ("wte", "lm_head", "c_attn"),
    "LlamaForCausalLM": ("embed_tokens", "lm_head", "q_proj"),
    "Gemma2ForCausalLM": ("embed_tokens", "lm_head", "q_proj"),
}
R = 3


def configs(name: str) -> dict[str, dict[str, Any]]:
    table, head, layer = ENDS[name]
    return {
        "a layer": {"target_modules": [layer]},
        "the head": {"target_modules": [head]},
        "the embedding": {"target_modules": [table]},
        "both ends": {"target_modules": [head, table, layer]},
        "both ends, one adapter": {"target_modules": [head, table], "ensure_weight_tying": True},
        "trained rows": {"target_modules": [layer], "trainable_token_indices": [7, 3, 41]},
        "a saved head": {"target_modules": [layer], "modules_to_save": [head]},
        "the head, with rank scaling": {"target_modules": [head], "use_rslora": True, "lora_alpha": 7},
    }


CASES = [(name, kind) for name in ENDS for kind in configs(name)]


def adapted(model: Any, kind: str, name: str, **options: Any) -> Any:
    """The model with adapters whose every tensor is trained a little, so that none is at its start of zeros."""
    config = peft.LoraConfig(r=R, **configs(name)[kind] | options)
    return stirred(peft.get_peft_model(model, config))


def stirred(found: Any) -> Any:
    torch.manual_seed(1)
    for tensor in found.parameters():
        if tensor.requires_grad:
            tensor.data += 0.1 * torch.randn_like(tensor)
    return found.double().eval()


def both_orders(name: str, kind: str, **options: Any) -> Iterator[tuple[Any, Any]]:
    first = built(name)
    loss = use_tied_loss(first, backend="chunked")
    yield adapted(first, kind, name, **options), loss
    second = adapted(built(name), kind, name, **options)
    yield second, use_tied_loss(second, backend="chunked")


@pytest.fixture(autouse=True)
def _no_word_of_full_logits() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="use_tied_loss")
        yield


def assert_same_step(found: Any, plain: Any) -> None:
    (output, gradients), (expected, theirs) = step(found), step(plain)
    assert logits_of(output)._made is None
    torch.testing.assert_close(output.loss, expected.loss, check_dtype=False, rtol=1e-6, atol=0.0)
    assert {name.replace("_orig_mod.", "") for name in gradients} == theirs.keys()
    torch.testing.assert_close(gradients, theirs, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(
        output.logits.detach(), expected.logits.detach(), check_dtype=False, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_in_both_orders_a_step_is_pefts_own(name: str, kind: str) -> None:
    for model, loss in both_orders(name, kind):
        assert_same_step(model, adapted(built(name), kind, name))
        assert loss.status.losses == {"chunked": 1}
        assert loss.status.fallbacks == 0


@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if case[0] == "GPT2LMHeadModel"])
def test_in_both_orders_removing_gives_back_what_was_there(name: str, kind: str) -> None:
    kinds = [type(one).forward for one in adapted(built(name), kind, name).modules()]
    for model, loss in both_orders(name, kind):
        step(model)
        loss.remove()
        assert [type(one).forward for one in model.modules()] == kinds
        assert not any("loss_record" in one.__dict__ for one in model.modules())


@pytest.mark.parametrize("kind", ["the head", "trained rows", "a saved head", "both ends"])
@pytest.mark.parametrize("bfloat16", [False, True])
def test_with_gradient_checkpointing_and_compiled_too(kind: str, bfloat16: bool) -> None:
    name = "LlamaForCausalLM"
    plain = adapted(built(name), kind, name).float()
    expected, theirs = step(plain.train())
    for model, _ in both_orders(name, kind):
        model.float().train()
        if bfloat16:
            model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        output, found = step(model, None if bfloat16 else torch.compile(model, backend="eager"))
        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=0.0)
        for key, gradient in theirs.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-3, atol=1e-6)


def two(model: Any, name: str) -> Any:
    config = peft.LoraConfig(r=R, target_modules=[ENDS[name][1]])
    found = peft.get_peft_model(model, config, adapter_name="one")
    found.add_adapter("two", peft.LoraConfig(r=2, target_modules=[ENDS[name][1]], lora_alpha=5))
    found.base_model.set_adapter(["one", "two"])
    return stirred(found)


def disabled(model: Any, name: str) -> Any:
    found = adapted(model, "the head", name)
    found.base_model.disable_adapter_layers()
    found.base_model.model.get_input_embeddings().weight.requires_grad_()
    return found


def merged(model: Any, name: str) -> Any:
    found = adapted(model, "the head", name)
    found.base_model.merge_adapter()
    found.base_model.model.get_input_embeddings().weight.requires_grad_()
    return found


@pytest.mark.parametrize("made", [two, disabled, merged])
def test_two_adapters_a_disabled_and_a_merged_one(made: Callable[[Any, str], Any]) -> None:
    name = "LlamaForCausalLM"
    model = built(name)
    use_tied_loss(model, backend="chunked")
    assert_same_step(made(model, name), made(built(name), name))
    after = made(built(name), name)
    use_tied_loss(after, backend="chunked")
    assert_same_step(after, made(built(name), name))


def test_an_adapter_that_is_added_between_two_steps() -> None:
    name = "LlamaForCausalLM"
    model = built(name)
    loss = use_tied_loss(model, backend="chunked")
    step(model)
    found = adapted(model, "the head", name)
    assert_same_step(found, adapted(built(name), "the head", name))
    found.add_adapter("more", peft.LoraConfig(r=2, target_modules=["lm_head"]))
    found.set_adapter("more")
    step(stirred(found))
    assert loss.status.losses == {"chunked": 3}


@pytest.mark.filterwarnings("default:use_tied_loss")
def test_dora_on_the_head_is_exact_and_says_once_that_it_keeps_the_logits() -> None:
    name = "LlamaForCausalLM"
    for model, loss in both_orders(name, "the head", use_dora=True):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            output, found = step(model)
            step(model)
        ours = [str(one.message) for one in seen if "use_tied_loss" in str(one.message)]
        expected, theirs = step(adapted(built(name), "the head", name, use_dora=True))
        torch.testing.assert_close(output.loss, expected.loss, check_dtype=False)
        torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-7)
        assert len(set(ours)) == len(ours) >= 1
        assert all("between head and loss; the loss is right" in one for one in ours)
        assert loss.status.fallbacks >= 2
        assert "because of" in str(loss.status)


def test_a_head_that_is_replaced_afterwards_computes_without_logits_too() -> None:
    """As transformers' `resize_token_embeddings` replaces it."""
    model = built("LlamaForCausalLM")
    loss = use_tied_loss(model, backend="chunked")
    model.resize_token_embeddings(V + 5, mean_resizing=False)
    other = copy.deepcopy(model)
    TiedLoss.of(other).remove()
    output, found = step(model)
    expected, theirs = step(other)
    assert output.logits._made is None
    assert output.logits.shape[-1] == V + 5
    torch.testing.assert_close(output.loss, expected.loss, check_dtype=False)
    torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-7)
    assert loss.status.losses == {"chunked": 1}


def test_a_head_of_another_kind_put_there_afterwards_is_named() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            return 2 * super().forward(input)

    model = built("LlamaForCausalLM")
    loss = use_tied_loss(model)
    model.lm_head = Scaled(16, V, bias=False).double()
    with pytest.warns(UserWarning, match="a head that has changed: the head of LlamaForCausalLM is a Scaled"):
        warnings.filterwarnings("default", message="use_tied_loss")
        step(model)
    assert loss.status.fallbacks == 1


def test_a_wrapper_that_is_not_pefts_is_refused_by_its_whole_name() -> None:
    model = built("LlamaForCausalLM")
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(UsageError, match=r"a head of class torch\.nn\.\S+\.Sequential, expected a torch\.nn\.Linear"):
        use_tied_loss(model)


def test_another_kind_of_adapter_on_the_head_is_refused_by_its_whole_name() -> None:
    config = peft.AdaLoraConfig(target_modules=["lm_head"], total_step=10)
    with pytest.raises(UsageError, match=r"a head of class peft\.tuners\.adalora\.\S+, expected"):
        use_tied_loss(peft.get_peft_model(built("LlamaForCausalLM"), config))


def test_of_pefts_model_the_handle_is_that_of_the_model_inside() -> None:
    name = "LlamaForCausalLM"
    inside = built(name)
    use_tied_loss(inside)
    found = adapted(inside, "the head", name)
    TiedLoss.of(found).remove()
    assert type(found.base_model.model.lm_head.base_layer) is nn.Linear


def test_generation_and_a_copy_of_an_adapted_model() -> None:
    name = "LlamaForCausalLM"
    plain = adapted(built(name), "both ends", name)
    for model, _ in both_orders(name, "both ends"):
        ids = {"input_ids": IDS, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(**ids), plain.generate(**ids))
        assert_same_step(copy.deepcopy(model), plain)
