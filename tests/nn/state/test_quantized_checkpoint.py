"""A quantised table on disk: saved once, loaded into a float model, and refused where it would be lost."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from bowline.errors import CheckpointError, TieError
from bowline.nn import (
    check_ties,
    load_checkpoint,
    quantize_tied,
    resize_vocab,
    save_checkpoint,
    tie_weights,
    untie_weights,
)
from bowline.nn.modules.quantized_ends import QuantizedEmbedding, QuantizedHead
from bowline.nn.state import stored_tables
from tests.nn.models import TinyLM
from tests.nn.modules.test_quantized_families import BUILDERS, built, logits


def config_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("name", BUILDERS)
def test_a_saved_table_loads_into_a_float_model_and_gives_equal_logits(name: str, where: str, tmp_path: Path) -> None:
    model = built(name)
    quantize_tied(model)
    assert save_checkpoint(model, tmp_path / "small") == ("model.safetensors",)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "small")
    torch.manual_seed(3)
    with torch.device(where):
        again: Any = type(model)(config).eval()
    report = load_checkpoint(again, tmp_path / "small")
    assert report
    assert report.tied
    assert check_ties(again)
    assert torch.equal(logits(again), logits(model))
    save_checkpoint(again, tmp_path / "again")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("small", "again")]
    assert files[0] == files[1]


def test_the_file_has_the_table_once_and_the_config_names_it(tmp_path: Path) -> None:
    model = built("llama")
    quantize_tied(model)
    save_checkpoint(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {name for name in stored if "table" in name or "head" in name} == {
        "model.embed_tokens.table.values",
        "model.embed_tokens.table.scale",
    }
    config = config_of(tmp_path)
    assert config["tie_word_embeddings"] is True
    assert config["quantization_config"]["tables"] == ["model.embed_tokens.table"]


def test_a_table_of_several_embeddings_is_written_once_and_loads_into_all(tmp_path: Path) -> None:
    model = built("bart")
    ties = quantize_tied(model)
    save_checkpoint(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert [name for name in stored if name.endswith("values")] == ["model.shared.table.values"]
    again = built("bart")
    with torch.no_grad():
        again.get_input_embeddings().weight.zero_()
    assert set(load_checkpoint(again, tmp_path).tied) == set(ties)
    assert torch.equal(logits(again), logits(model))


def test_only_a_checkpoint_with_a_table_is_loaded_with_a_search_for_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search walks over all modules, which takes longer than a small model's load should."""
    searched: list[nn.Module] = []

    def search(model: nn.Module) -> list[list[str]]:
        searched.append(model)
        return []

    model = built("llama")
    save_checkpoint(model, tmp_path / "float")
    quantize_tied(model)
    save_checkpoint(model, tmp_path / "int8")
    monkeypatch.setattr(stored_tables, "_tables", search)
    load_checkpoint(built("llama"), tmp_path / "float")
    assert not searched
    load_checkpoint(model, tmp_path / "int8")
    assert searched == [model]


def test_transformers_refuses_the_files_instead_of_initialising_both_ends(tmp_path: Path) -> None:
    model = built("llama")
    quantize_tied(model)
    save_checkpoint(model, tmp_path)
    with pytest.raises(ValueError, match="quant_method"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_an_untied_model_is_saved_without_the_entry_that_it_was_loaded_with(tmp_path: Path) -> None:
    model = built("llama")
    quantize_tied(model)
    save_checkpoint(model, tmp_path / "small")
    again: Any = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(tmp_path / "small")).eval()
    load_checkpoint(again, tmp_path / "small")
    before = logits(again)
    untie_weights(again)
    save_checkpoint(again, tmp_path / "float")
    assert "quantization_config" not in config_of(tmp_path / "float")
    other: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float")
    torch.testing.assert_close(logits(other), before, rtol=1e-5, atol=1e-5)


def test_a_model_without_a_config_is_saved_and_loaded_too(tmp_path: Path) -> None:
    model, again = TinyLM(50, 8, bias=True), TinyLM(50, 8, bias=True, seed=4)
    tie_weights(model, on_conflict="source")
    tie_weights(again, on_conflict="source")
    quantize_tied(model)
    save_checkpoint(model, tmp_path)
    load_checkpoint(again, tmp_path)
    ids = torch.arange(9)
    assert torch.equal(again(ids), model(ids))
    load_checkpoint(again, tmp_path)  # and once more, now that it has a table
    assert isinstance(again.head, QuantizedHead)


def test_a_load_that_fails_leaves_the_float_model_as_it_was(tmp_path: Path) -> None:
    model = TinyLM(50, 8, bias=True)
    tie_weights(model, on_conflict="source")
    quantize_tied(model)
    save_checkpoint(model, tmp_path)
    untied = TinyLM(50, 8, bias=True)
    with pytest.raises(TieError, match=r"emb\.weight: the checkpoint has one int8 table .*head\.weight could"):
        load_checkpoint(untied, tmp_path)
    smaller = TinyLM(40, 8, bias=True)
    tie_weights(smaller, on_conflict="source")
    with pytest.raises(CheckpointError, match=r"emb\.table\.values is \(50, 8\)"):
        load_checkpoint(smaller, tmp_path)
    assert type(smaller.emb) is nn.Embedding
    assert smaller.head.weight is smaller.emb.weight


@pytest.mark.real
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_trained_model_is_saved_loaded_resized_and_untied_with_its_logits(
    dtype: torch.dtype, tmp_path: Path, smollm2: Path
) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype).eval()
    ids = transformers.AutoTokenizer.from_pretrained(smollm2)("The bowline is a knot", return_tensors="pt").input_ids
    rows = model.config.vocab_size
    with torch.no_grad():
        plain = model(ids).logits
        quantize_tied(model)
        logits = model(ids).logits
    assert float((logits - plain).abs().max()) < 0.06 * float(plain.abs().max())
    assert torch.equal(logits[0].argmax(-1), plain[0].argmax(-1))
    save_checkpoint(model, tmp_path)
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        again: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    load_checkpoint(again, tmp_path)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, logits)
        resize_vocab(again, rows + 8)
        assert torch.equal(again(ids).logits[..., :rows], logits)
        untie_weights(again)
        tolerance = 1e-4 if dtype is torch.float32 else 0.25
        torch.testing.assert_close(again(ids).logits[..., :rows], logits, rtol=0.02, atol=tolerance)


# --- what save_pretrained of transformers would lose ------------------------------------------------------------------


def test_save_pretrained_raises_before_it_writes_anything(tmp_path: Path) -> None:
    model = built("gemma")
    quantize_tied(model)
    for options in ({}, {"state_dict": model.state_dict()}):
        with pytest.raises(CheckpointError, match=r"from_pretrained would initialise both.*save_checkpoint"):
            model.save_pretrained(tmp_path / "out", **options)
        with pytest.raises(CheckpointError, match="from_pretrained would initialise both"):
            copy.deepcopy(model).save_pretrained(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="from_pretrained would initialise both"):
        pickle.loads(pickle.dumps(model)).save_pretrained(tmp_path / "out")
    with pytest.raises(CheckpointError, match="from_pretrained would initialise both"):
        model.model.save_pretrained(tmp_path / "inner")


def test_save_pretrained_of_a_model_around_the_quantised_one_raises_too(tmp_path: Path) -> None:
    model = built("llama")
    quantize_tied(model)

    class Outer(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig
        _supports_sdpa = True

        def __init__(self, inner: nn.Module) -> None:
            super().__init__(model.config)
            self.inner = inner

    with pytest.raises(CheckpointError, match="from_pretrained would initialise both"):
        Outer(model).save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_state_dicts_and_torch_save_go_on_and_so_does_save_pretrained_once_untied(tmp_path: Path) -> None:
    model = built("llama")
    quantize_tied(model)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = built("llama")
    quantize_tied(other)
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(logits(other), logits(model))
    untie_weights(model)
    model.save_pretrained(tmp_path / "float")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float")
    torch.testing.assert_close(logits(again), logits(model))
    assert not any(isinstance(module, QuantizedEmbedding) for module in again.modules())
