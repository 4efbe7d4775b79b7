"""Tokenizers as GGUF: llama.cpp's rule for merging splits as the library does; what would not is refused."""

from __future__ import annotations

import base64
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from struct import pack, unpack
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from bowline.checkpoint.formats.gguf.value_bytes import array_items
from bowline.checkpoint.formats.sentencepiece_model import PieceType, read_model
from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.errors import BowlineError, FormatError, UsageError
from bowline.export.gguf.gguf_tokens import tokenizer_keys
from bowline.export.gguf.key_values import text as key_text
from bowline.export.gguf.token_types import TokenizerKeys
from tests.checkpoint.sentencepiece_files import field, model, number
from tests.edit.tokenizer.small_tokenizers import (
    byte_fallback,
    byte_level,
    drawn_byte_fallback,
    sentencepiece_bpe,
    texts,
    unigram,
)
from tests.export.gguf_tokenizers import TOKENIZERS, charsmap, gemma_like, llama_like, t5_like

SPACE = "▁"


def score(value: float) -> bytes:
    """The score of a piece in SentencePiece's file."""
    return b"\x15" + pack("<f", value)


def keys_of(content: str, rows: int | None = None, **others: str) -> TokenizerKeys:
    """The keys of a tokenizer."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "tokenizer.json").write_text(content, encoding="utf-8")
        for name, text in others.items():
            (Path(place) / f"{name}.json").write_text(text, encoding="utf-8")
        size = tokenizers.Tokenizer.from_str(content).get_vocab_size() if rows is None else rows
        with LocalDirectory(place) as files:
            return tokenizer_keys(files, {}, size)


def tokens_of(keys: Mapping[str, bytes]) -> list[str]:
    return [item.decode() for item in array_items(keys["tokenizer.ggml.tokens"])[1]]


def scores_of(keys: Mapping[str, bytes]) -> list[float]:
    return [unpack("<f", item)[0] for item in array_items(keys["tokenizer.ggml.scores"])[1]]


def types_of(keys: Mapping[str, bytes]) -> list[int]:
    return [unpack("<i", item)[0] for item in array_items(keys["tokenizer.ggml.token_type"])[1]]


def truth(keys: Mapping[str, bytes], name: str) -> bool:
    return keys[f"tokenizer.ggml.{name}"][-1] == 1


def merged(keys: Mapping[str, bytes], text: str) -> list[int]:
    """The ids that llama.cpp makes of a text without added tokens, by the rule in its source (llm_tokenizer_spm)."""
    ids, scores = {token: number for number, token in enumerate(tokens_of(keys))}, scores_of(keys)
    if not text:
        return []
    parts = list(((" " if truth(keys, "add_space_prefix") else "") + text).replace(" ", SPACE))
    while True:
        pairs = [
            (-scores[ids[parts[at] + parts[at + 1]]], at)
            for at in range(len(parts) - 1)
            if parts[at] + parts[at + 1] in ids
        ]
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found = []
    for part in parts:
        found += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


def overlap(content: str) -> bool:
    """Whether two merges of one token can meet in `x y z`, and the right one has the lower rank."""
    ranks = {tuple(pair): rank for rank, pair in enumerate(json.loads(content)["model"]["merges"])}
    return any(
        ranks[left, right] > ranks[right, made[len(right) :]]
        for left, right in ranks
        for made in [left + right]
        if (right, made[len(right) :]) in ranks and made.startswith(right) and left != right
    )


@settings(max_examples=150, deadline=None)
@given(drawn_byte_fallback(), st.lists(texts, max_size=6))
def test_scores_split_as_merges_do(content: str, corpus: list[str]) -> None:
    try:
        keys = keys_of(content).keys
    except UsageError as error:
        assert "llama.cpp" in error.message
        return
    library = tokenizers.Tokenizer.from_str(content)
    for text in corpus:
        if not overlap(content):
            assert merged(keys, text) == library.encode(text, add_special_tokens=False).ids


def with_runs() -> str:
    """Runs of two characters whose merges are in Gemma 3's order: the longest left part first, both runs by turns."""
    runs = [letter * size for size in range(2, 7) for letter in (SPACE, "-")]
    content = json.loads(sentencepiece_bpe([SPACE, "-", "a", "b", *runs, "▁a", "-a", "ab"]))
    merges = content["model"]["merges"]
    of_runs = [pair for pair in merges if "".join(pair) in runs]
    others = [pair for pair in merges if "".join(pair) not in runs]
    content["model"]["merges"] = sorted(of_runs, key=lambda pair: (-len(pair[0]), -len(pair[1]))) + others
    content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    return json.dumps(content)


RUNS = with_runs()


@settings(max_examples=200, deadline=None)
@given(st.text("- ab", max_size=30))
def test_runs_grow_as_gemma_3s_merges_have_them(text: str) -> None:
    expected = tokenizers.Tokenizer.from_str(RUNS).encode(text, add_special_tokens=False).ids
    assert merged(keys_of(RUNS).keys, text) == expected


def test_runs_that_would_not_grow_from_the_left_are_refused() -> None:
    content = json.loads(RUNS)
    merges = content["model"]["merges"]
    merges.insert(1, merges.pop(merges.index(["-", "-"])))
    with pytest.raises(UsageError, match="again after merges of other tokens"):
        keys_of(json.dumps(content))


@pytest.mark.parametrize("name", ["Llama 2", "Llama 2 in transformers 5", "Gemma"])
def test_trained_tokenizers_split_alike(name: str) -> None:
    content = TOKENIZERS[name]()
    keys, library = keys_of(content).keys, tokenizers.Tokenizer.from_str(content)
    for text in (
        "The bowline makes a loop",
        "def tie(weights):  x 12 größer 结绳 🪢",
        "the  the   the    the     knot",
    ):
        assert merged(keys, text) == library.encode(text, add_special_tokens=False).ids


def test_the_types_of_gemmas_tokens() -> None:
    content = gemma_like()
    keys = keys_of(content, rows=500).keys
    types = dict(zip(tokens_of(keys), types_of(keys), strict=True))
    expected = {
        "<unk>": PieceType.UNKNOWN,
        "<s>": PieceType.CONTROL,
        "<0x41>": PieceType.BYTE,
        "\n\n": PieceType.USER_DEFINED,
        "<unused0>": PieceType.USER_DEFINED,
        "▁▁": PieceType.NORMAL,  # the library makes it by merges: raw text has spaces
        "▁bowline": PieceType.NORMAL,
        "[PAD499]": PieceType.UNUSED,
    }
    assert {token: types[token] for token in expected} == expected
    assert not truth(keys, "add_space_prefix") and truth(keys, "add_bos_token") and not truth(keys, "add_eos_token")


def test_a_t5_gets_its_end_its_scores_and_its_map_of_characters() -> None:
    content = t5_like()
    keys = keys_of(content).keys
    pieces = json.loads(content)["model"]["vocab"]
    assert tokens_of(keys) == [text for text, _ in pieces]
    assert scores_of(keys) == pytest.approx([score for _, score in pieces], rel=1e-6)
    assert types_of(keys)[:4] == [PieceType.CONTROL, PieceType.CONTROL, PieceType.UNKNOWN, PieceType.NORMAL]
    assert types_of(keys)[-3:] == [PieceType.CONTROL] * 3  # the sentinels
    written = b"".join(array_items(keys["tokenizer.ggml.precompiled_charsmap"])[1])
    assert base64.b64encode(written).decode() == json.loads(content)["normalizer"]["precompiled_charsmap"]
    assert truth(keys, "add_eos_token") and not truth(keys, "add_bos_token")
    assert truth(keys, "remove_extra_whitespaces") and truth(keys, "add_space_prefix")
    assert unpack("<II", keys["tokenizer.ggml.unknown_token_id"]) == (4, 2)


def test_a_filler_is_not_the_text_of_a_token() -> None:
    content = json.loads(unigram())
    size = len(content["model"]["vocab"]) + 3
    content["model"]["vocab"][-1][0] = f"[PAD{size}]"
    listed = tokens_of(keys_of(json.dumps(content), rows=size + 2).keys)
    assert len(set(listed)) == len(listed) == size + 2


def test_a_metaspace_before_texts_that_begin_with_a_space_is_noted() -> None:
    for content in (llama_like(), unigram()):
        assert any("one space more" in note for note in keys_of(content).notes)
    assert keys_of(byte_fallback()).notes == ()


def test_conditions_of_added_tokens_are_noted() -> None:
    content = json.loads(byte_fallback())
    content["added_tokens"][1]["rstrip"] = True
    assert "conditions (single_word, lstrip, rstrip) of the added token '<s>'" in keys_of(json.dumps(content)).notes[0]


def test_bytes_for_unknown_characters_are_noted() -> None:
    content = json.loads(t5_like())
    content["model"]["byte_fallback"] = True
    assert any("becomes one unknown token in llama.cpp" in note for note in keys_of(json.dumps(content)).notes)


# --- SentencePiece's model alone -------------------------------------------------------------------------------------


def slow_keys(data: bytes, rows: int, name: str = "spiece.model", **others: dict[str, Any]) -> TokenizerKeys:
    """The keys of a SentencePiece model with some files beside it."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / name).write_bytes(data)
        for other, content in others.items():
            (Path(place) / f"{other}.json").write_text(json.dumps(content))
        with LocalDirectory(place) as files:
            return tokenizer_keys(files, {}, rows)


def t5_model() -> tuple[bytes, dict[str, bytes]]:
    """A model as SentencePiece writes it, and the keys of the same tokenizer in `tokenizer.json`."""
    content = json.loads(t5_like())
    pieces = [
        (text, score, PieceType(kind))
        for (text, score), kind in zip(content["model"]["vocab"][:-3], [3, 3, 2] + [1] * 999, strict=False)
    ]
    charsmap = base64.b64decode(content["normalizer"]["precompiled_charsmap"])
    data = model(pieces) + field(2, number(3, 1)) + field(3, field(2, charsmap))
    return data, dict(keys_of(json.dumps(content), rows=len(pieces) + 7).keys)


@pytest.mark.parametrize(
    "settings", [{"extra_ids": 3}, {"additional_special_tokens": [f"<extra_id_{number}>" for number in range(3)]}]
)
def test_a_sentencepiece_model_gives_the_keys_of_its_tokenizer_json(settings: dict[str, Any]) -> None:
    data, expected = t5_model()
    found = slow_keys(data, rows=len(tokens_of(expected)), tokenizer_config=settings)
    sentinels = slice(len(tokens_of(expected)) - 7, len(tokens_of(expected)) - 4)
    assert tokens_of(expected)[sentinels] == ["<extra_id_2>", "<extra_id_1>", "<extra_id_0>"]
    assert types_of(found.keys) == types_of(expected) and tokens_of(found.keys) == tokens_of(expected)
    scores = "tokenizer.ggml.scores"
    assert {key: value for key, value in found.keys.items() if key != scores} == {
        key: value for key, value in expected.items() if key != scores
    }
    assert scores_of(found.keys)[: sentinels.start] == scores_of(expected)[: sentinels.start]
    assert "the tokenizer is read from spiece.model" in found.notes


def test_a_bpe_of_sentencepiece_and_the_tokens_beside_it() -> None:
    pieces = [("<unk>", 0.0, PieceType.UNKNOWN), ("<s>", 0.0, PieceType.CONTROL), ("</s>", 0.0, PieceType.CONTROL)]
    pieces += [(f"<0x{byte:02X}>", 0.0, PieceType.BYTE) for byte in range(256)]
    pieces += [("▁▁", 0.0, PieceType.USER_DEFINED), ("▁a", -1.0, PieceType.NORMAL), ("a", -2.0, PieceType.NORMAL)]
    identity = field(2, number(3, 2) + number(35, 1)) + field(3, field(1, b"identity") + number(4, 0))
    beside = {"262": {"content": "<|turn|>", "special": True}, "263": {"content": "<note>", "special": False}}
    found = slow_keys(
        model(pieces) + identity, 265, "tokenizer.model", tokenizer_config={"added_tokens_decoder": beside}
    )
    types = dict(zip(tokens_of(found.keys), types_of(found.keys), strict=True))
    assert {token: types[token] for token in ("▁▁", "<|turn|>", "<note>", "[PAD264]")} == {
        "▁▁": PieceType.NORMAL,
        "<|turn|>": PieceType.CONTROL,
        "<note>": PieceType.USER_DEFINED,
        "[PAD264]": PieceType.UNUSED,
    }
    assert merged(found.keys, "a") == [tokens_of(found.keys).index("▁a")]
    assert truth(found.keys, "add_bos_token") and not truth(found.keys, "add_eos_token")
    normalised = model(pieces) + field(2, number(3, 2)) + field(3, field(2, charsmap({"a": "b"})))
    with pytest.raises(UsageError, match=r"tokenizer\.model: BPE with normalised text"):
        slow_keys(normalised, 265, "tokenizer.model")
    with pytest.raises(UsageError, match="lacks 256 of the 256 byte pieces"):
        slow_keys(model(pieces[:3]) + identity, 265, "tokenizer.model")


@pytest.mark.parametrize(
    ("data", "settings", "seen"),
    [
        (field(2, number(3, 3)), {}, "algorithm 3, expected 1"),
        (field(2, number(24, 1)), {}, "spaces belong to the word before them"),
        (field(3, field(2, b"\xff\xff\xff\xff0")), {}, r"spiece\.model: precompiled_charsmap: 5 bytes"),
        (b"\x0a\x7f", {}, "not a SentencePiece model"),
        (b"", {"added_tokens_decoder": {"x": {"content": "y"}}}, "added_tokens_decoder: 'x'"),
        (b"", {"added_tokens_decoder": {"99999999": {"content": "y"}}}, "has the id 99999999"),
        (b"", {"added_tokens_decoder": {"7": {"content": "</s>"}}}, "two tokens are '</s>'"),
        (b"", {"added_tokens_decoder": {"4000": {"content": "y"}}}, "the tokenizer has ids up to 4000"),
        (field(1, field(1, b"zz") + score(math.nan)), {}, "the token 80 has the score nan"),
        (field(1, field(1, b"zz") + score(-math.inf)), {}, "the token 80 has the score -inf"),
        (field(1, field(1, b"zz") + number(3, 9)), {}, "piece 80 has the type 9"),
        (field(1, field(1, b"zz") + number(3, 2)), {}, "2 pieces are for unknown text, expected 1"),
        (b"\x0a\x00" * 100_000, {}, "more than 300 pieces"),
        (
            b"",
            {"extra_ids": 3, "added_tokens_decoder": {"80": {"content": "<new>"}}},
            "'<extra_id_2>' has the id 80, as '<new>' has",
        ),
        (b"", {"extra_ids": -1}, "extra_ids is -1"),
        (b"", {"extra_ids": 10**5}, "extra_ids is 100000"),
        (b"", {"additional_special_tokens": ["<new>"]}, "the token '<new>' is named without an id"),
    ],
)
def test_a_damaged_sentencepiece_model_is_refused(data: bytes, settings: dict[str, Any], seen: str) -> None:
    with pytest.raises(BowlineError, match=seen) as raised:
        slow_keys(t5_model()[0] + data, 300, tokenizer_config=settings)
    assert raised.value.help


def test_a_model_cut_off_anywhere_is_read_or_refused() -> None:
    whole, _ = t5_model()
    for end in range(len(whole)):
        with suppress(BowlineError):
            read_model(whole[:end], "spiece.model", most=300)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.binary(min_size=1, max_size=11)), min_size=1, max_size=4))
def test_a_changed_sentencepiece_model_is_read_or_refused(changes: list[tuple[int, bytes]]) -> None:
    data = bytearray(t5_model()[0])
    for at, found in changes:
        at %= len(data)
        data[at : at + len(found)] = found
    try:
        slow_keys(bytes(data), 300)
    except BowlineError as error:
        assert error.help


def test_a_long_list_of_repeated_characters_takes_little_time() -> None:
    """Each of 20,000 merges is held against the last of any other, not against the last of every character."""

    def doubled(content: dict[str, Any]) -> None:
        for place in range(20_000):
            letter = chr(0x4E00 + place)
            for text in (letter, letter * 2):
                content["model"]["vocab"].setdefault(text, len(content["model"]["vocab"]))
            content["model"]["merges"].append([letter, letter])

    started = time.process_time()
    keys_of(edited(byte_fallback(), doubled), rows=60_000)
    assert time.process_time() - started < 20


def test_compositions_and_conditions_of_a_byte_level_tokenizer_are_noted() -> None:
    def change(content: dict[str, Any]) -> None:
        content["normalizer"] = {"type": "NFC"}
        content["added_tokens"].append({"id": 590, "content": "<new>", "special": False, "lstrip": True})

    notes = keys_of(edited(byte_level(), change), rows=600).notes
    assert any("composes characters (NFC)" in note for note in notes) and any("'<new>'" in note for note in notes)


@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("plain", "plain"),
        ([{"name": [1]}, 3, {"name": "tools", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "tools", "template": "t"}], None),
        ([{"name": "default", "template": 3}], None),
        (3, None),
    ],
)
def test_of_several_chat_templates_the_default_is_written(template: Any, written: str | None) -> None:
    keys = keys_of(byte_level(), tokenizer_config=json.dumps({"chat_template": template})).keys
    assert keys.get("tokenizer.chat_template") == (None if written is None else key_text(written))


def test_tiktokens_file_is_refused() -> None:
    with pytest.raises(UsageError, match="is a list of tokens by tiktoken"):
        slow_keys(b"IQ== 0\nIg== 1\n", 300, "tokenizer.model")


# --- what is refused -------------------------------------------------------------------------------------------------


def edited(content: str, change: Callable[[dict[str, Any]], object]) -> str:
    parsed = json.loads(content)
    change(parsed)
    return json.dumps(parsed)


def without_merge(content: dict[str, Any]) -> None:
    del content["model"]["merges"][7]


def out_of_order(content: dict[str, Any]) -> None:
    merges = content["model"]["merges"]
    last = next(at for at in range(len(merges) - 1, 0, -1) if "".join(merges[at]) == "".join(merges[at - 1]))
    merges.insert(0, merges.pop(last))


def without_byte(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["<0x0b>"] = vocabulary.pop("<0x0B>")


def lower_cased(content: dict[str, Any]) -> None:
    content["normalizer"]["normalizers"].insert(0, {"type": "Lowercase"})


def space_in_merge(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary |= {"a b": len(vocabulary), "a bc": len(vocabulary) + 1}
    content["model"]["merges"].append(["a b", "c"])


def emptied(content: dict[str, Any]) -> None:
    content["model"].update(vocab={}, merges=[])
    content["added_tokens"] = []


RUNS_OF_SPACES = {"type": "Replace", "pattern": {"Regex": " {2,}"}}
REFUSED: dict[str, tuple[Callable[[], str], Callable[[dict[str, Any]], object], str]] = {
    "a merge is missing": (byte_fallback, without_merge, r"has no merge of .* and .*, but llama\.cpp merges any two"),
    "merges of a token apart": (byte_fallback, out_of_order, r"again after merges of other tokens"),
    "a byte is missing": (byte_fallback, without_byte, r"lacks 1 of the 256 byte pieces, the first <0x0B>"),
    "lower case": (byte_fallback, lower_cased, r"normalises by an object of 2 and splits by null"),
    "whole words first": (byte_fallback, lambda content: content["model"].update(ignore_merges=True), "ignore_merges"),
    "no unknown token": (t5_like, lambda content: content["model"].update(unk_id=None), r"unk_id is null"),
    "a special token of the lowest score": (
        t5_like,
        lambda content: content["model"]["vocab"].__setitem__(0, ["<pad>", -99.0]),
        "the lowest score is that of a special token",
    ),
    "a space inside a piece": (
        t5_like,
        lambda content: content["model"]["vocab"].__setitem__(9, ["of▁the", -9.0]),
        "has tokens with a space inside",
    ),
    "another normaliser": (t5_like, lambda content: content.update(normalizer={"type": "NFKC"}), "normalises by"),
    "spaces stripped but not merged": (
        unigram,
        lambda content: content.update(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
        "normalises by",
    ),
    "another splitter": (t5_like, lambda content: content.update(pre_tokenizer={"type": "Whitespace"}), "splits by"),
    "no splitter": (t5_like, lambda content: content.update(pre_tokenizer=None), "splits by null"),
    "byte-level in lower case": (
        byte_level,
        lambda content: content.update(normalizer={"type": "Lowercase"}),
        "expected nothing or NFC: llama.cpp does not normalise",
    ),
    "whole words first, split as GPT-2's": (
        byte_level,
        lambda content: content["model"].update(ignore_merges=True),
        "ignore_merges is true, which llama.cpp does for llama-bpe only, not for gpt-2",
    ),
    "random merges": (byte_level, lambda content: content["model"].update(dropout=0.5), "model.dropout is 0.5"),
    "random merges with bytes": (byte_fallback, lambda content: content["model"].update(dropout=0.5), "dropout"),
    "a mark at the end of words": (
        byte_level,
        lambda content: content["model"].update(end_of_word_suffix="</w>"),
        "model.end_of_word_suffix is '</w>'",
    ),
    "a merge with a space inside": (byte_level, space_in_merge, "has a space in 'a b' or 'c'"),
    "a merge into no token": (
        byte_level,
        lambda content: content["model"]["merges"].append(["z", "9"]),
        r"model.merges\[\d+\] makes 'z9', which is no token",
    ),
    "no tokens": (byte_level, emptied, "model.vocab is empty"),
    "a token of a million characters": (
        byte_fallback,
        lambda content: content["model"]["vocab"].update({"xy" * 500_000: len(content["model"]["vocab"])}),
        "is longer than 1024 characters",
    ),
    "several spaces become something else": (
        t5_like,
        lambda content: content.update(normalizer={**RUNS_OF_SPACES, "content": "x"}),
        "normalises by",
    ),
    "two maps of characters": (
        t5_like,
        lambda content: content.update(normalizer={"type": "Sequence", "normalizers": [content["normalizer"]] * 2}),
        "normalises by",
    ),
    "special tokens only": (
        t5_like,
        lambda content: (
            content["model"].update(vocab=content["model"]["vocab"][:3]),
            content.update(added_tokens=content["added_tokens"][:3]),
        ),
        "model.vocab has only special tokens",
    ),
    "a score beyond float32": (
        t5_like,
        lambda content: content["model"]["vocab"].__setitem__(9, ["x", -1e300]),
        "float32 cannot hold",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_would_split_otherwise_is_refused(name: str) -> None:
    build, change, seen = REFUSED[name]
    content = edited(build(), change)
    with pytest.raises(UsageError, match=seen):
        keys_of(content, rows=600)


@pytest.mark.parametrize(
    "value",
    [
        7,
        "not base64!",
        base64.b64encode(b"\1\2\3").decode(),
        base64.b64encode(b"\xff\xff\xff\xff" + bytes(12)).decode(),
        base64.b64encode(b"\x03\0\0\0" + bytes(12)).decode(),
        base64.b64encode(charsmap({"a": "b"})[:-1]).decode(),
        base64.b64encode(pack("<I", 1024) + b"\xff" * 1024 + b"a\0").decode(),  # units that point outside
        base64.b64encode(charsmap({"a": "b", "c": "defg"})[:-5]).decode(),  # a text that is not there
        base64.b64encode(pack("<I", 4) + bytes(6)).decode(),  # a trie of one unit, where 256 belong
    ],
)
def test_a_damaged_map_of_characters_is_refused(value: Any) -> None:
    content = edited(t5_like(), lambda content: content["normalizer"].update(precompiled_charsmap=value))
    with pytest.raises(FormatError, match=r"normalizer\.precompiled_charsmap"):
        keys_of(content, rows=600)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(TOKENIZERS)), st.data())
def test_a_damaged_tokenizer_is_read_or_refused(name: str, data: st.DataObject) -> None:
    content = json.loads(TOKENIZERS[name]())
    place: Any = content
    while isinstance(place, dict | list) and place:
        keys = sorted(place) if isinstance(place, dict) else range(min(len(place), 5))
        key = data.draw(st.sampled_from(list(keys)))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            place[key] = data.draw(
                st.sampled_from([None, 0, -1, 10**9, "", "x", [], {}, True, [[]], {"type": "Metaspace"}])
            )
            break
        place = place[key]
    try:
        keys_of(json.dumps(content), rows=600)
    except BowlineError as error:
        assert error.help
