"""Every file that holds ids is rewritten, and what cannot be rewritten is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from bowline.errors import FormatError, UsageError
from tests.edit.tokenizer.small_tokenizers import TRAINED, byte_fallback, byte_level, parsed, pruned, unigram, wordpiece


def with_part(content: str, **parts: Any) -> str:
    return json.dumps({**json.loads(content), **parts}, ensure_ascii=False, indent=2)


def test_ids_in_post_processors_padding_and_added_tokens_are_mapped() -> None:
    result = pruned(wordpiece(), ["the bowline"])
    written = parsed(result.files.files["tokenizer.json"])
    ids = written["model"]["vocab"]
    assert written["post_processor"] == {"type": "BertProcessing", "sep": ["[SEP]", ids["[SEP]"]], "cls": ["[CLS]", 2]}
    assert written["padding"]["pad_id"] == ids["[PAD]"]
    assert result.after.encode("the bowline").tokens == result.before.encode("the bowline").tokens


def test_a_template_in_a_sequence_is_mapped() -> None:
    original = unigram()
    content = json.loads(original)
    number = next(token["id"] for token in content["added_tokens"] if token["content"] == "<extra_id_0>")
    token = {"id": "</x>", "ids": [number], "tokens": ["<extra_id_0>"]}
    template: dict[str, Any] = {"type": "TemplateProcessing", "special_tokens": {"</x>": token}}
    template |= {"single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</x>", "type_id": 0}}]}
    template |= {"pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]}
    steps = {"type": "Sequence", "processors": [template]}
    result = pruned(with_part(original, post_processor=steps), ["a rope"])
    mapped = result.selection.new_id(number)
    assert mapped == len(result.selection.kept) - 1
    assert result.after.encode("rope").ids[-1] == mapped


def test_unigrams_unknown_id_and_scores_are_kept() -> None:
    content = unigram()
    result = pruned(content, ["rope 漢"])
    old, new = json.loads(content)["model"], parsed(result.files.files["tokenizer.json"])["model"]
    assert new["vocab"][new["unk_id"]] == ["<unk>", 0.0]
    assert dict(map(tuple, new["vocab"])).items() <= dict(map(tuple, old["vocab"])).items()
    assert min(score for _, score in new["vocab"]) == min(score for _, score in old["vocab"])


def test_the_other_vocabulary_files_follow() -> None:
    content = byte_level()
    model, added = json.loads(content)["model"], json.loads(content)["added_tokens"]
    merges = "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in model["merges"])
    settings = {
        "added_tokens_decoder": {"0": added[0] | {"id": 0}, "300": {"content": "x"}},
        "pad_token_id": 0,
        "eos_token": {"content": "<|end|>"},
        "model_max_length": 1000000000000000019884624838656,
    }
    name = {number: text for text, number in model["vocab"].items()}[300]
    settings["added_tokens_decoder"] = {"0": {"content": "<|end|>"}, "300": {"content": name}}
    others = {
        "vocab.json": json.dumps(model["vocab"], ensure_ascii=False),
        "merges.txt": merges,
        "tokenizer_config.json": json.dumps(settings, indent=2),
        "added_tokens.json": json.dumps({"<|end|>": 0}),
        "tokenizer.model": "old pieces",
        "special_tokens_map.json": '{"eos_token": "<|end|>"}',
    }
    result = pruned(content, ["the rope"], others)
    files, selection = result.files.files, result.selection
    written = parsed(files["tokenizer.json"])["model"]
    assert parsed(files["vocab.json"]) == written["vocab"]
    lines = (files["merges.txt"] or b"").decode().split("\n")
    assert lines[0] == "#version: 0.2"
    assert [tuple(line.split(" ")) for line in lines[1:-1]] == [tuple(pair) for pair in written["merges"]]
    decoder = parsed(files["tokenizer_config.json"])["added_tokens_decoder"]
    assert decoder == {"0": {"content": "<|end|>"}, str(selection.new_id(300)): {"content": name}}
    assert selection.new_id(300) >= 0
    assert files["tokenizer.model"] is None
    assert "tokenizer.model holds the old ids and is removed" in result.files.notes[0]
    assert "added_tokens.json" not in files  # its ids are the same
    assert "special_tokens_map.json" not in files
    model_from_files = tokenizers.models.BPE(parsed(files["vocab.json"]), [tuple(pair) for pair in written["merges"]])
    assert model_from_files.token_to_id("t") == written["vocab"]["t"]


def test_vocab_txt_keeps_the_lines_of_kept_tokens() -> None:
    content = wordpiece()
    vocabulary = json.loads(content)["model"]["vocab"]
    lines = "".join(f"{text}\n" for text in sorted(vocabulary, key=vocabulary.__getitem__))
    result = pruned(content, ["a knot"], {"vocab.txt": lines})
    written = (result.files.files["vocab.txt"] or b"").decode()
    assert {text: number for number, text in enumerate(written.splitlines())} == parsed(
        result.files.files["tokenizer.json"]
    )["model"]["vocab"]


@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("style", [{"indent": 2}, {"separators": (",", ":")}, {}])
def test_the_text_keeps_its_keys_and_its_style(kind: str, style: dict[str, Any]) -> None:
    original = json.dumps(json.loads(TRAINED[kind]()), ensure_ascii=False, **style)
    written = pruned(original, ["the rope 绳"]).files.files["tokenizer.json"]
    assert written is not None
    assert written.decode() == json.dumps(json.loads(written), ensure_ascii=False, **style)
    assert list(json.loads(written)) == list(json.loads(original))


def test_merges_as_strings_stay_strings() -> None:
    content = json.loads(byte_level())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    written = parsed(pruned(json.dumps(content), ["the rope"]).files.files["tokenizer.json"])
    assert written["model"]["merges"]
    assert set(written["model"]["merges"]) < set(content["model"]["merges"])


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"chat_template.jinja": "{{ eos_token_id }}"}, "the chat template uses 'eos_token_id'"),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "a", "template": "{{ token_ids }}"}]}'}, "'token_ids'"),
        ({"tokenization_x.py": ""}, "tokenization_x.py: Python code of a tokenizer"),
        ({"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["x.Slow", null]}}'}, "Python code for the tok"),
        ({"tokenizer_config.json": '{"pad_token": "[PAD]"}'}, "pad_token names the token '\\[PAD\\]', which"),
        ({"added_tokens.json": '{"<new>": 420}'}, "added_tokens.json names the token '<new>'"),
    ],
)
def test_what_cannot_be_pruned_faithfully_is_refused_by_name(others: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pruned(byte_level(), ["rope"], others)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"vocab.json": '{"!": 0}'}, "vocab.json: the token '!' has the id 0, tokenizer.json gives it"),
        ({"merges.txt": "q q\n"}, "merges.txt: line 1, 'q q', is not a merge of tokenizer.json"),
        ({"vocab.txt": "q\n"}, "vocab.txt: the token 'q' has the id 0, tokenizer.json gives it"),
        ({"added_tokens.json": '{"<|end|>": 7}'}, "the token '<|end|>' has the id 7, in tokenizer.json it has 0"),
    ],
)
def test_files_of_another_vocabulary_are_refused(others: dict[str, str], message: str) -> None:
    with pytest.raises(FormatError, match=message.replace("|", "\\|")):
        pruned(byte_level(), ["rope"], others)


def test_a_dropout_is_refused() -> None:
    content = json.loads(byte_fallback())
    content["model"]["dropout"] = 0.1
    with pytest.raises(UsageError, match=r"a dropout of 0\.1, so that a text splits differently"):
        pruned(json.dumps(content), ["rope"])


def test_a_post_processor_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="post_processor: 'Other'"):
        pruned(with_part(byte_level(), post_processor={"type": "Other"}), ["rope"])


def test_tokens_that_the_library_numbers_otherwise_are_refused() -> None:
    content = json.loads(byte_level())
    content["added_tokens"].append(content["added_tokens"][0] | {"content": "<far>", "id": 1000})
    with pytest.raises(FormatError, match="the id 1000 in the file, but tokenizers gives it"):
        pruned(json.dumps(content), ["rope"])


def test_a_line_that_vocab_txt_has_twice_has_its_last_number() -> None:
    vocabulary = {"[UNK]": 0, "a": 2, "b": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    result = pruned(backend.to_str(), ["a"], {"vocab.txt": "[UNK]\na\na\nb\n"})
    assert result.files.files["vocab.txt"] == b"[UNK]\na\nb\n"
