"""The class that a config asks for, and the tokenizer that the files beside it make."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from bowline.errors import ConfigError, FormatError, UsageError
from bowline.models.auto import FAMILIES, load, load_config, model_class
from bowline.models.common.tokenizer import Tokenizer
from bowline.models.gpt2 import GPT2Config, GPT2LMHeadModel, GPT2Model

pytestmark = pytest.mark.usefixtures("quiet_transformers")
HF: Any = transformers  # which makes its names when they are asked for
TEXT = "The knot holds, and it doesn't slip. Größe: naïve 東京 🙂 twice  over"
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "knot",
    "hold",
    "##s",
    "and",
    "it",
    "slip",
    ",",
    ".",
    "the",
]


def gpt2(**more: Any) -> GPT2Config:
    return GPT2Config(vocab_size=300, n_embd=8, n_layer=1, n_head=2, n_positions=32, **more)


# --- classes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [GPT2Model, GPT2LMHeadModel])
def test_a_saved_model_comes_back_as_its_own_class(cls: Any, tmp_path: Path) -> None:
    model = cls(gpt2())
    model.save_pretrained(tmp_path)
    got = load(tmp_path)
    assert type(got) is cls
    assert {name: tensor.tolist() for name, tensor in got.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in model.state_dict().items()
    }
    assert load(tmp_path, dtype="bfloat16").dtype is torch.bfloat16
    assert load_config(tmp_path).n_embd == 8


@pytest.mark.parametrize("name", FAMILIES)
def test_every_class_of_the_table_is_there(name: str) -> None:
    if name.startswith(("Bert", "T5", "LSTM")):
        pytest.importorskip(f"bowline.models.{FAMILIES[name]}")
    cls = model_class({"architectures": [name]})
    assert cls is getattr(import_module(f"bowline.models.{FAMILIES[name]}"), name)


def test_a_class_that_is_not_here_falls_back_on_the_head_of_its_family() -> None:
    assert model_class({"architectures": ["GPT2DoubleHeadsModel"], "model_type": "gpt2"}) is GPT2LMHeadModel
    assert model_class({"model_type": "gpt2"}) is GPT2LMHeadModel
    assert model_class({"architectures": ["GPT2Model"], "model_type": "gpt2"}) is GPT2Model


@pytest.mark.parametrize(
    "config",
    [{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, {}, {"architectures": 3, "model_type": []}],
)
def test_an_unknown_architecture_is_named_beside_what_there_is(config: dict[str, Any], tmp_path: Path) -> None:
    GPT2LMHeadModel(gpt2()).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for call in (load, load_config):
        with pytest.raises(ConfigError) as caught:
            call(tmp_path)
        assert str(caught.value).startswith(f"{tmp_path}: config: ")
        assert repr(config.get("model_type")) in str(caught.value)
        assert "LlamaForCausalLM" in str(caught.value) or "architectures" not in config or config["architectures"] == 3
        assert "GPT2LMHeadModel" in str(caught.value)


def test_a_checkpoint_without_a_config_says_so(tmp_path: Path) -> None:
    GPT2LMHeadModel(gpt2()).save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load(tmp_path)


# --- tokenizers -----------------------------------------------------------------------------------------------------


def byte_level(directory: Path) -> Path:
    """`vocab.json` and `merges.txt`, trained on the text."""
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator([TEXT] * 3, vocab_size=290, special_tokens=["<|endoftext|>"], show_progress=False)
    made.save_model(str(directory))
    (directory / "config.json").write_text(json.dumps({"model_type": "gpt2", "eos_token_id": 0}))
    return directory


def wordpiece(directory: Path, **settings: Any) -> Path:
    letters = sorted({char for char in TEXT.lower() + TEXT if not char.isspace()})
    words = list(dict.fromkeys([*WORDS, *letters, *(f"##{char}" for char in letters)]))
    (directory / "vocab.txt").write_text("\n".join(words) + "\n")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def test_byte_pairs_from_vocab_and_merges_are_transformers(tmp_path: Path) -> None:
    ours = Tokenizer.from_pretrained(byte_level(tmp_path))
    theirs = HF.GPT2TokenizerFast(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    for text in (TEXT, " a", "<|endoftext|>the knot<|endoftext|>", "", "\n\n"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ours.encode(TEXT)) == TEXT
    assert (ours.eos, ours.pad, ours.mask, ours.mask_token) == (0, None, None, None)
    assert len(ours) == len(theirs)


@pytest.mark.parametrize("lower", [True, False])
def test_wordpiece_from_a_vocabulary_is_transformers(lower: bool, tmp_path: Path) -> None:
    ours = Tokenizer.from_pretrained(wordpiece(tmp_path, do_lower_case=lower))
    theirs = HF.BertTokenizerFast(str(tmp_path / "vocab.txt"), do_lower_case=lower)
    for text in (TEXT, "The knot holds [MASK].", "", "knots"):
        assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode("the knot holds")) == "the knot holds"
    assert (ours.mask_token, ours.mask, ours.pad) == ("[MASK]", 4, 0)


def test_tokenizer_json_comes_first_and_neither_cuts_nor_pads(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    whole = Tokenizer.from_pretrained(wordpiece(source))
    whole.backend.enable_truncation(3)
    whole.backend.enable_padding(length=20)
    byte_level(tmp_path)
    whole.backend.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_pretrained(tmp_path)
    assert ours.encode("the knot holds") == [2, 5, 6, 7, 8, 3]


def test_roles_are_read_as_strings_and_as_objects(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "<|endoftext|>"}}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<end>", "added_tokens_decoder": {"290": {"content": "<end>", "special": True}}})
    )
    ours = Tokenizer.from_pretrained(tmp_path)
    assert ours.pad == 0
    assert ours.eos == len(ours) - 1
    assert ours.encode("<end>") == [ours.eos]


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({}, UsageError, "no tokenizer, expected tokenizer.json"),
        ({"spiece.model": "x"}, UsageError, r"its tokenizer is only in spiece\.model.*save_pretrained"),
        ({"tokenizer.model": "x"}, UsageError, r"its tokenizer is only in tokenizer\.model"),
        ({"tokenizer.json": "{"}, FormatError, "the tokenizer cannot be read"),
        ({"vocab.txt": "a\nb"}, FormatError, r"\[CLS\] or \[SEP\] is missing|cannot be read"),
        ({"vocab.json": '{"a": 0}', "merges.txt": "#version\na b c"}, FormatError, "'a b c', expected two parts"),
        ({"vocab.json": "[]", "merges.txt": ""}, FormatError, r"vocab\.json: expected an object, got list"),
    ],
)
def test_what_is_no_tokenizer_is_said_plainly(files: dict[str, str], error: Any, message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(error, match=message):
        Tokenizer.from_pretrained(tmp_path)


def test_pieces_are_the_text_and_never_half_a_character(tmp_path: Path) -> None:
    ours = Tokenizer.from_pretrained(byte_level(tmp_path))
    ids = ours.encode("The knot") + [token for char in "🙂東京ß" * 12 for token in ours.encode(char)]
    for cut in (0, 3):
        pieces = list(ours.pieces(iter(ids[cut:]), after=ids[:cut]))
        assert "".join(pieces) == ours.decode(ids)[len(ours.decode(ids[:cut])) :]
        assert len(pieces) > 40
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_half_a_character_at_the_end_is_shown_as_such(tmp_path: Path) -> None:
    ours = Tokenizer.from_pretrained(byte_level(tmp_path))
    half = [token for token in range(len(ours)) if ours.decode([token]) == "\N{REPLACEMENT CHARACTER}"][:1]
    assert "".join(ours.pieces([*ours.encode("knot"), *half])) == "knot\N{REPLACEMENT CHARACTER}"
