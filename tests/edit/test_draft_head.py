"""Heads of few rows for speculative decoding, as SGLang and vLLM read them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from bowline.edit import EditReport, open_checkpoint
from bowline.errors import TieError, UsageError
from tests.checkpoints import BERT, T5, table, write
from tests.edit.tokenizer.small_tokenizers import byte_level

TEXT = "def tie(weights):\n    return weights['lm_head'] is weights['embed']\n# one matrix, not two\n" * 3
ROWS = 20
WIDTH, END = 16, 3


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return language_model(tmp_path / "target", tied=True)


def language_model(place: Path, *, tied: bool, **options: Any) -> Path:
    tokenizer = byte_level()
    size = tokenizers.Tokenizer.from_str(tokenizer).get_vocab_size() + 5  # with rows that no token has
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=WIDTH,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=END,
        **options,
    )
    LlamaForCausalLM(config).save_pretrained(place)
    (place / "tokenizer.json").write_text(tokenizer)
    (place.parent / "corpus.txt").write_text(TEXT)
    return place


def drafter(target: Path, place: Path) -> Path:
    """A draft model in the layout of EAGLE 3, whose head is the target's."""
    tensors = load_file(target / "model.safetensors")
    head = tensors["model.embed_tokens.weight"]
    place.mkdir()
    parts = {"fc.weight": torch.randn(WIDTH, 3 * WIDTH), "midlayer.hidden_norm.weight": torch.ones(WIDTH)}
    save_file({"lm_head.weight": head, **parts}, place / "model.safetensors", {"format": "pt"})
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": len(head)}
    (place / "config.json").write_text(json.dumps({**config, "eos_token_id": END, "tie_word_embeddings": False}))
    (place / "tokenizer.json").write_bytes((target / "tokenizer.json").read_bytes())
    return place


def drafted(source: Path, out: Path, rows: int = ROWS, **options: Any) -> EditReport:
    options = {"corpus": [source.parent / "corpus.txt"], **options}
    with open_checkpoint(source) as checkpoint:
        return checkpoint.edit().prune(draft=rows, **options).commit(out)


def most_frequent(target: Path, rows: int) -> list[int]:
    """What the specification says: the end of text, which the config names, and the most frequent other tokens."""
    ids = tokenizers.Tokenizer.from_file(str(target / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    counts = Counter(number for number in ids if number != END)
    ranked = sorted(counts, key=lambda number: (-counts[number], number))
    return sorted([END, *ranked[: rows - 1]])


def as_sglang_reads(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """SGLang's `hot_token_id`: the target's id of each row."""
    return tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def as_vllm_reads(tensors: dict[str, torch.Tensor], hidden: torch.Tensor, size: int) -> torch.Tensor:
    """vLLM's logits: the head's in the target's columns, minus infinity elsewhere."""
    logits = hidden @ tensors["lm_head.weight"].T
    whole = torch.full((len(hidden), size), -torch.inf)
    whole[:, torch.arange(len(tensors["d2t"])) + tensors["d2t"]] = logits
    return whole


@pytest.mark.parametrize("tied", [True, False])
def test_the_rows_are_those_of_the_most_frequent_tokens(tmp_path: Path, tied: bool) -> None:
    target = language_model(tmp_path / "target", tied=tied)
    report = drafted(target, tmp_path / "draft")
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    before = load_file(target / "model.safetensors")
    head = before["model.embed_tokens.weight" if tied else "lm_head.weight"]
    expected = most_frequent(target, ROWS)
    assert as_sglang_reads(tensors).tolist() == expected
    assert torch.equal(tensors["lm_head.weight"], head[expected])
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero().flatten().tolist() == expected and len(tensors["t2d"]) == len(head)
    hidden = torch.randn(3, WIDTH)
    whole = hidden @ head.T
    found = as_vllm_reads(tensors, hidden, len(head))
    assert torch.allclose(found[:, expected], whole[:, expected], atol=1e-6)
    assert torch.isneginf(found).sum() == 3 * (len(head) - ROWS)
    assert f"{ROWS} of {len(head)} rows make the draft head: 1 named in a config, 19 most frequent" in str(report)


def test_the_result_has_the_head_its_config_and_maps_and_no_model(target: Path, tmp_path: Path) -> None:
    drafted(target, tmp_path / "draft")
    place = tmp_path / "draft"
    names = {path.name for path in place.iterdir() if path.name != ".bowline"}
    assert names == {"config.json", "model.safetensors", "token_map.json", "token_map.pt"}
    size = len(load_file(target / "model.safetensors")["model.embed_tokens.weight"])
    assert json.loads((place / "config.json").read_text()) == {
        "vocab_size": size,
        "draft_vocab_size": ROWS,
        "hidden_size": WIDTH,
        "tie_word_embeddings": False,
    }


def test_the_token_map_is_a_list_that_torch_loads_without_executing_anything(target: Path, tmp_path: Path) -> None:
    """SGLang's `load_token_map` does this with the file of `--speculative-token-map`."""
    drafted(target, tmp_path / "draft")
    listed = torch.load(tmp_path / "draft" / "token_map.pt", weights_only=True)
    assert torch.tensor(listed, dtype=torch.int64).tolist() == most_frequent(target, ROWS)
    mapped = json.loads((tmp_path / "draft" / "token_map.json").read_text())
    assert mapped == {str(number): row for row, number in enumerate(listed)}


def test_a_draft_model_stays_whole_with_a_smaller_head(target: Path, tmp_path: Path) -> None:
    source = drafter(target, tmp_path / "eagle")
    drafted(source, tmp_path / "draft")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "draft" / "model.safetensors")
    assert set(after) == {*before, "d2t", "t2d"}
    assert torch.equal(after["fc.weight"], before["fc.weight"])
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"][as_sglang_reads(after)])
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config == {**json.loads((source / "config.json").read_text()), "draft_vocab_size": ROWS}
    with pytest.raises(TieError, match="d2t: this draft model has a reduced head already"):
        drafted(tmp_path / "draft", tmp_path / "again", corpus=[tmp_path / "corpus.txt"])


def test_a_draft_model_in_place_can_be_undone(target: Path, tmp_path: Path) -> None:
    from bowline.edit import undo

    source = drafter(target, tmp_path / "eagle")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    with open_checkpoint(source) as checkpoint:
        checkpoint.edit().prune(corpus=[tmp_path / "corpus.txt"], draft=ROWS).commit(in_place=True)
    undo(source)
    assert {path.name: path.read_bytes() for path in source.iterdir() if path.is_file()} == before


def test_a_keep_file_comes_first(target: Path, tmp_path: Path) -> None:
    size = len(load_file(target / "model.safetensors")["model.embed_tokens.weight"])
    (tmp_path / "keep.txt").write_text(f"{size - 7}\n")
    drafted(target, tmp_path / "draft", rows=4, keep_tokens=tmp_path / "keep.txt")
    kept = as_sglang_reads(load_file(tmp_path / "draft" / "model.safetensors")).tolist()
    assert kept == sorted([size - 7, *most_frequent(target, 3)])


def test_a_text_with_too_few_tokens_is_refused_with_their_number(target: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("one")
    with pytest.raises(UsageError, match=r"the corpus has only \d+ different tokens") as caught:
        drafted(target, tmp_path / "draft", corpus=[tmp_path / "short.txt"])
    assert not (tmp_path / "draft").exists()
    rows = int(str(caught.value.help).rsplit(" ", 1)[1])
    drafted(target, tmp_path / "draft", rows=rows, corpus=[tmp_path / "short.txt"])


@pytest.mark.parametrize("rows", [0, -1, 10**6])
def test_an_impossible_number_of_rows_is_refused(target: Path, tmp_path: Path, rows: int) -> None:
    with pytest.raises(UsageError, match=f"--draft {rows}: expected a number of rows from 1 to"):
        drafted(target, tmp_path / "draft", rows=rows)


def test_a_head_alone_never_takes_the_place_of_a_model(target: Path, tmp_path: Path) -> None:
    with open_checkpoint(target) as checkpoint, pytest.raises(UsageError, match="its result is no model"):
        checkpoint.edit().prune(corpus=[tmp_path / "corpus.txt"], draft=ROWS).commit(in_place=True)


def test_without_a_corpus_nothing_ranks_the_tokens(target: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no corpus says which"):
        drafted(target, tmp_path / "draft", corpus=[])


def test_a_draft_model_without_a_head_is_refused(target: Path, tmp_path: Path) -> None:
    source = drafter(target, tmp_path / "eagle")
    tensors = load_file(source / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(TieError, match="stores no head, loaders take the target's"):
        drafted(source, tmp_path / "draft")


def test_a_scale_after_the_head_is_said(tmp_path: Path) -> None:
    target = language_model(tmp_path / "target", tied=True, final_logit_softcapping=30.0)
    assert "states final_logit_softcapping: logits of the draft head need it too" in str(
        drafted(target, tmp_path / "d")
    )


def test_a_head_with_a_bias_is_refused(target: Path, tmp_path: Path) -> None:
    names = ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias")
    source = write(tmp_path / "bert", {names[0]: table(), names[1]: table()[:, 0].copy()}, BERT)
    (source / "tokenizer.json").write_bytes((target / "tokenizer.json").read_bytes())
    with pytest.raises(TieError, match=r"cls.predictions.bias: the head has a bias"):
        drafted(source, tmp_path / "draft", corpus=[tmp_path / "corpus.txt"])


def test_an_encoder_decoder_is_refused(target: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "t5", {"shared.weight": table()}, {**T5, "is_encoder_decoder": True})
    (source / "tokenizer.json").write_bytes((target / "tokenizer.json").read_bytes())
    with pytest.raises(TieError, match="is an encoder-decoder model, expected a decoder"):
        drafted(source, tmp_path / "draft", corpus=[tmp_path / "corpus.txt"])
