"""A tied matrix quantised once: smaller where quantising the head alone makes a model bigger, and within its bound."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from bowline.errors import TieError, UsageError
from bowline.nn import find_ties, tie_weights, use_tied_loss
from bowline.nn.modules.quantize_tied import quantize_tied
from bowline.nn.modules.quantized_ends import QuantizedEmbedding, QuantizedHead
from bowline.nn.modules.quantized_table import QuantizedTable
from tests.nn.models import HEAD, BertLike, EncoderDecoder, TinyLM

TORCHAO = Path(__file__).parents[3] / ".peers" / "torchao"
ROWS, WIDTH = 1000, 64
IDS = torch.arange(ROWS).reshape(4, 250)


def tiny(*, bias: bool = False) -> TinyLM:
    model = TinyLM(ROWS, WIDTH, bias=bias).eval()
    tie_weights(model, on_conflict="source")
    return model


def stored(model: nn.Module) -> int:
    """Bytes of the model's file."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()


# --- what torchao does ----------------------------------------------------------------------------------------------

PLAIN = f"""
import copy, io, json, torch
from torch.nn import functional as F
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from tests.nn.models import TinyLM, tied

def stored(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()

model, seen, ids = tied(TinyLM({ROWS}, {WIDTH})), dict(), torch.arange({ROWS})
seen["float"] = stored(model)
quantize_(model, Int8WeightOnlyConfig())
seen["types"] = [type(model.emb.weight).__name__, type(model.head.weight).__name__]
seen["head only"] = stored(model)
matrix = model.head.weight.dequantize()
model.emb.weight = model.head.weight
seen["shared"] = stored(model)
seen["gap"] = float((model(ids) - F.linear(model.norm(F.embedding(ids, matrix)), matrix)).abs().max())
twin = copy.deepcopy(model)
seen["one"] = [model.emb.weight is model.head.weight, twin.emb.weight is twin.head.weight]
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def torchao() -> dict[str, Any]:
    """What torchao makes of the tied model, in a process of its own: its presence changes what others import."""
    if not (TORCHAO / "torchao").is_dir():
        pytest.skip("torchao is not unpacked in .peers/torchao: see the Makefile")
    root = TORCHAO.parents[1]
    path = os.pathsep.join([str(TORCHAO), str(root), str(root / "src")])
    done = subprocess.run(
        [sys.executable, "-c", PLAIN],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return cast(dict[str, Any], json.loads(done.stdout.splitlines()[-1]))


def test_plain_int8_on_linear_layers_unties_and_the_model_grows(torchao: dict[str, Any]) -> None:
    assert torchao["types"] == ["Parameter", "Int8Tensor"]
    assert torchao["head only"] > torchao["float"] + ROWS * WIDTH


def test_a_torchao_tensor_shared_by_hand_serves_both_ends_and_is_stored_once(torchao: dict[str, Any]) -> None:
    assert torchao["one"] == [True, True]
    assert torchao["gap"] < 1e-3
    assert torchao["shared"] < torchao["float"] / 3


# --- what Bowline does ----------------------------------------------------------------------------------------------


def test_quantised_once_and_shared_the_model_shrinks_to_a_byte_an_entry() -> None:
    model = tiny()
    before = stored(model)
    assert before > 4 * ROWS * WIDTH
    assert quantize_tied(model) == (find_ties(tiny()).ties[0],)
    assert ROWS * WIDTH + 4 * ROWS < stored(model) < ROWS * WIDTH + 4 * ROWS + 6000
    assert sorted(model.state_dict()) == ["emb.table.scale", "emb.table.values", "norm.bias", "norm.weight"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_an_entry_is_off_by_at_most_half_its_rows_scale(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) * torch.logspace(-3, 3, ROWS)[:, None]
    matrix[0] = 0
    matrix[1, 1:] = 0  # one entry, which is the largest
    matrix[2] = torch.finfo(dtype).tiny  # scales below the smallest normal number
    matrix = matrix.to(dtype)
    matrix[3] = torch.finfo(dtype).max
    table = QuantizedTable(matrix)
    assert (table.values.dtype, table.scale.dtype) == (torch.int8, dtype)
    exact = table.values.double() * table.scale.double()[:, None]
    assert bool(((matrix.double() - exact).abs() <= table.scale.double()[:, None] / 2 * (1 + 1e-12)).all())
    largest = matrix.double().abs().amax(1)
    allowed = table.scale.double()[:, None] / 2 * (1 + 127 * torch.finfo(dtype).eps) * (1 + 1e-12)
    assert bool(((matrix.double() - table.rows().double()).abs() <= allowed).all()), "rounded to the dtype once"
    assert bool((table.scale.double() <= largest / 127 * (1 + 2 * torch.finfo(dtype).eps) + 1e-7).all())
    assert table.values[0].any().item() is False


def test_both_ends_compute_with_the_same_matrix() -> None:
    model, plain = tiny(bias=True), tiny(bias=True)
    quantize_tied(model)
    table = cast(QuantizedTable, model.emb.table)
    plain.emb.weight.data = table.values.float() * table.scale[:, None]
    assert plain.head.weight is plain.emb.weight
    assert torch.equal(model.emb(IDS), plain.emb(IDS))
    torch.testing.assert_close(model(IDS), plain(IDS), rtol=1e-5, atol=1e-5)


def test_a_logit_is_off_by_at_most_half_its_scale_times_the_hidden_states_norm() -> None:
    model, plain = tiny(bias=True).double(), tiny(bias=True).double()
    quantize_tied(model)
    hidden = plain.norm(plain.emb(IDS))
    bound = cast(QuantizedTable, model.emb.table).scale / 2 * hidden.abs().sum(-1, keepdim=True)
    gap = (model.head(hidden) - plain.head(hidden)).abs()
    assert bool((gap <= bound + 1e-12).all())
    assert gap.max() > 0


def test_the_head_computes_in_blocks_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    quantize_tied(model)
    whole = model(IDS)
    monkeypatch.setattr("bowline.nn.modules.quantized_table.BLOCK_ELEMENTS", 7 * WIDTH)
    torch.testing.assert_close(model(IDS), whole)
    again = tiny()
    quantize_tied(again)
    assert torch.equal(again.emb.table.values, model.emb.table.values)  # type: ignore[arg-type]


@pytest.mark.parametrize("assign", [False, True])
def test_a_saved_state_loads_into_a_model_quantised_afresh(assign: bool, tmp_path: Path) -> None:
    model = tiny(bias=True)
    quantize_tied(model)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = TinyLM(ROWS, WIDTH, bias=True, seed=5).eval()
    tie_weights(other, on_conflict="source")
    quantize_tied(other)
    assert not torch.equal(other(IDS), model(IDS))
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=assign)
    assert torch.equal(other(IDS), model(IDS))


def test_the_table_stays_one_through_copies_casts_and_meta() -> None:
    model = tiny()
    quantize_tied(model)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model).to(torch.float64),
        copy.deepcopy(model).to("meta").to_empty(device="cpu"),
    ]
    for other in copies:
        emb, head = cast(Any, other.emb), cast(Any, other.head)
        assert emb.table is head.table
        assert emb.table is not cast(Any, model.emb).table
    assert copies[2](IDS).dtype is torch.float64
    assert torch.equal(copies[0](IDS), model(IDS))


def test_the_bias_stays_a_parameter_and_a_tied_bias_tied() -> None:
    model = BertLike()
    tie_weights(model, on_conflict="source")
    ids = torch.arange(11)[None]
    before = model(ids)
    quantize_tied(model, [("decoder.weight", "emb.weight")])
    assert model.decoder.bias is model.bias
    assert "emb.table.values" in model.state_dict()
    assert (model(ids) - before).abs().max() < 0.1


def test_three_tables_and_a_head_hold_one() -> None:
    model = EncoderDecoder()
    tie_weights(model, on_conflict="source")
    ids = torch.arange(11)[None]
    before = model(ids)
    ties = quantize_tied(model, [("head.weight", "shared.weight")])
    assert len(ties) == 1
    ends = [cast(Any, module) for module in (model.shared, model.encoder, model.decoder, model.head)]
    assert [type(end) for end in ends] == [QuantizedEmbedding] * 3 + [QuantizedHead]
    assert len({id(end.table) for end in ends}) == 1
    assert stored(model) < stored(EncoderDecoder())
    assert (model(ids) - before).abs().max() < 0.1


def test_nothing_of_the_matrix_is_a_parameter_and_gradients_pass_the_head() -> None:
    model = tiny().double()
    quantize_tied(model)
    assert {name for name, _ in model.named_parameters()} == {"norm.weight", "norm.bias"}
    hidden = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    model.head(hidden).sum().backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad[0], model.head.weight.sum(0))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_model_of_transformers_generates_with_it() -> None:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config).eval()
    plain = copy.deepcopy(model)
    quantize_tied(model)
    plain.lm_head.weight.data = model.lm_head.weight
    ids = torch.arange(8)[None]
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


def test_a_model_with_the_tied_loss_is_quantised_as_without() -> None:
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    model: Any = transformers.GPT2LMHeadModel(config).eval()
    other = copy.deepcopy(model)
    use_tied_loss(other)
    assert quantize_tied(other) == quantize_tied(model)
    assert torch.equal(other(torch.arange(8)[None]).logits, model(torch.arange(8)[None]).logits)


# --- what is refused ------------------------------------------------------------------------------------------------


class Scaled(nn.Embedding):
    """It does more than look up, so to replace it would change what the model computes."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input) * 8


@pytest.mark.parametrize(
    ("embedding", "message"),
    [
        (Scaled(ROWS, WIDTH), "emb.weight: belongs to a Scaled"),
        (nn.Embedding(ROWS, WIDTH, max_norm=1.0), "emb.weight: belongs to an Embedding with max_norm"),
        (
            nn.Embedding(ROWS, WIDTH, _weight=torch.full((ROWS, WIDTH), torch.inf)),
            "emb.weight: holds values that are not",
        ),
    ],
    ids=["subclass", "max_norm", "infinite"],
)
def test_what_cannot_be_quantised_exactly_is_refused_and_the_model_is_as_it_was(
    embedding: nn.Embedding, message: str
) -> None:
    model = tiny()
    model.emb, model.head.weight = embedding, embedding.weight
    with pytest.raises(TieError, match=message):
        quantize_tied(model)
    assert model.emb is embedding
    assert model.head.weight is embedding.weight


def test_a_model_that_is_not_tied_is_refused_and_so_is_a_second_time() -> None:
    model = TinyLM(ROWS, WIDTH)
    with pytest.raises(TieError, match=r"TinyLM: no matrix is shared \(help: tie_weights"):
        quantize_tied(model)
    with pytest.raises(TieError, match=r"head\.weight <- emb\.weight: the two ends are not one parameter"):
        quantize_tied(model, [HEAD])
    tie_weights(model, on_conflict="source")
    quantize_tied(model)
    with pytest.raises(TieError, match="no matrix is shared"):
        quantize_tied(model)


def test_only_int8_and_int4_are_offered_and_groups_that_divide_the_width() -> None:
    with pytest.raises(UsageError, match=r"dtype=torch\.uint8: expected 'int8' or 'int4'"):
        quantize_tied(tiny(), dtype=torch.uint8)
    for dtype, size in (("int8", 48), ("int4", 48), ("int4", 1)):
        with pytest.raises(UsageError, match=rf"group_size={size}: expected an? (even )?divisor of the width, {WIDTH}"):
            quantize_tied(tiny(), dtype=dtype, group_size=size)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="group_size=0: expected a number of columns"):
        quantize_tied(tiny(), group_size=0)
