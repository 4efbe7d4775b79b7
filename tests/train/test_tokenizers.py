"""Tokenizers of new models: the same each time, and the same in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bowline.errors import UsageError
from bowline.models import Tokenizer
from bowline.train.text.corpus import find_text
from bowline.train.text.tokenizer_training import TextTokenizer, take_tokenizer, train_tokenizer
from tests.train.texts import library

FAMILIES = ("gpt2", "bert", "t5", "lstm")
CODE = "def __init__(self, x):\n    return [self.x for x in range(10)]  # done\n"


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return list(find_text(library(tmp_path_factory.mktemp("text") / "library")))


@pytest.fixture(scope="module")
def made(documents: list[str]) -> dict[str, TextTokenizer]:
    return {family: train_tokenizer(family, documents, 600) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_text_gives_the_same_tokenizer(
    family: str, documents: list[str], made: dict[str, TextTokenizer]
) -> None:
    for _ in range(3):  # the library's hash tables lie differently each time
        assert train_tokenizer(family, documents, 600).files == made[family].files


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_letters_that_are_no_pieces_of_their_own_are_not_numbered_by_chance(family: str) -> None:
    text = "".join(path.read_text() for path in sorted(Path(__file__).parents[2].glob("docs/*.md")))
    documents = [text[at : at + 5000] for at in range(0, len(text), 5000)]
    assert len({train_tokenizer(family, documents, 300).files["tokenizer.json"] for _ in range(4)}) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_it_has_as_many_tokens_as_were_asked_for(family: str, made: dict[str, TextTokenizer]) -> None:
    assert len(made[family]) == 600
    assert sorted(made[family].backend.get_vocab().values()) == list(range(600))


@settings(max_examples=50)
@given(text=st.text())
def test_bytes_have_tokens_for_every_text(text: str, made: dict[str, TextTokenizer]) -> None:
    assert made["gpt2"].backend.decode(made["gpt2"].encode([text])[0]) == text


def test_t5_keeps_the_spaces_that_code_indents_with(made: dict[str, TextTokenizer]) -> None:
    ids = made["t5"].encode([CODE])[0]
    assert made["t5"].backend.decode(ids) == CODE


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_that_a_text_spells_out_are_text(family: str, made: dict[str, TextTokenizer]) -> None:
    spelled = "<|endoftext|> [MASK] [SEP] </s> <pad> <extra_id_0>"
    unknown = made[family].backend.token_to_id("[UNK]" if family == "bert" else "<unk>")
    assert not (set(made[family].encode([spelled])[0]) & made[family].special) - {unknown}


def test_what_training_has_to_know(made: dict[str, TextTokenizer]) -> None:
    gpt2, bert, t5 = made["gpt2"], made["bert"], made["t5"]
    assert gpt2.backend.id_to_token(gpt2.separator) == "<|endoftext|>"
    numbers = [bert.backend.token_to_id(token) for token in ("[PAD]", "[CLS]", "[SEP]", "[MASK]")]
    assert numbers == [bert.pad, bert.begin, bert.separator, bert.mask]
    assert (t5.pad, t5.separator, t5.eos) == (0, 1, 1)
    assert t5.sentinels[:2] == (599, 598)
    assert t5.backend.id_to_token(599) == "<extra_id_0>"


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_and_bowline_load_it_alike(
    family: str, made: dict[str, TextTokenizer], tmp_path: Path, quiet_transformers: None
) -> None:
    from transformers import AutoTokenizer

    made[family].save(tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_pretrained(tmp_path)
    assert len(theirs) == len(ours) == 600
    assert theirs(CODE)["input_ids"] == ours.encode(CODE)
    assert theirs.decode(theirs(CODE)["input_ids"], skip_special_tokens=True) == ours.decode(ours.encode(CODE))
    ends = {"bert": theirs.sep_token_id}.get(family, theirs.eos_token_id)
    assert (ends, theirs.pad_token_id, theirs.mask_token_id) == (
        made[family].separator, made[family].pad, made[family].mask,
    )  # fmt: skip
    if family == "t5":
        assert theirs("a<extra_id_0>b", add_special_tokens=False)["input_ids"].count(599) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_one_that_was_saved_is_taken_as_it_is(family: str, made: dict[str, TextTokenizer], tmp_path: Path) -> None:
    made[family].save(tmp_path)
    taken = take_tokenizer(family, tmp_path)
    assert taken.files == made[family].files
    assert taken.encode([CODE]) == made[family].encode([CODE])
    for name in ("separator", "pad", "mask", "begin", "sentinels", "special"):
        assert getattr(taken, name) == getattr(made[family], name)


def test_a_vocabulary_that_the_text_does_not_support_is_an_error_or_gets_its_true_size() -> None:
    text = ["def knot(rope):\n    return rope\n"] * 9
    assert len(train_tokenizer("gpt2", text, 5000)) < 300
    with pytest.raises(UsageError, match=r"vocab_size=5000: the text is enough for only \d+ tokens"):
        train_tokenizer("gpt2", text, 5000, exactly=True)


def test_a_vocabulary_without_room_for_bytes_is_an_error() -> None:
    with pytest.raises(
        UsageError, match="vocab_size=200: expected at least 257, for the 256 bytes and one special token"
    ):
        train_tokenizer("gpt2", ["knot"], 200)


@pytest.mark.parametrize(
    ("family", "of", "lacking"),
    [("bert", "gpt2", "sep_token"), ("t5", "bert", "sentinel"), ("gpt2", "bert", "eos_token")],
)
def test_a_tokenizer_of_another_family_is_refused(
    family: str, of: str, lacking: str, made: dict[str, TextTokenizer], tmp_path: Path
) -> None:
    made[of].save(tmp_path)
    for asked in (True, False):  # whether the user gave the tokenizer, or a checkpoint that has it
        with pytest.raises(UsageError, match=f"the tokenizer has no {lacking}") as error:
            take_tokenizer(family, tmp_path, asked_for=asked)
        assert ("leave --tokenizer out" in str(error.value.help)) is asked


def test_a_directory_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tokenizer"):
        take_tokenizer("gpt2", tmp_path)


def test_gpt2_as_openai_had_it_is_taken_too(tmp_path: Path) -> None:
    vocab = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    taken = take_tokenizer("gpt2", tmp_path)
    assert taken.encode(["abba"]) == [[3, 2, 1]]
    assert (taken.separator, len(taken), sorted(taken.files)) == (0, 4, ["merges.txt", "vocab.json"])
