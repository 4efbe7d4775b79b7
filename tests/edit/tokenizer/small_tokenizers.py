"""Small tokenizers of every kind, trained on a text or drawn by hypothesis, and what pruning makes of them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.edit.tokenizer import (
    CorpusCount,
    PrunedFiles,
    StoredTokenizer,
    TokenSelection,
    check_split,
    count_tokens,
    read_tokenizer,
    rewritten_files,
    select_tokens,
)

TRAINING = [
    "The bowline makes a loop at the end of a rope.",
    "A loop that does not slip, and a knot that does not jam: the bowline.",
    "Tie the bowline around a post, a ring or a rail; untie it when the load is off.",
    "def tie(weights):\n    return weights['lm_head'] is weights['embed']\n",
    "Ein Knoten für Anfänger: größer, schöner, über die Brücke. 结绳记事",
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = "abcé日🪢"


@dataclass(frozen=True)
class Pruned:
    """A tokenizer before and after, as Bowline and the library see it."""

    tokenizer: StoredTokenizer
    corpus: CorpusCount
    selection: TokenSelection
    files: PrunedFiles
    difference: str | None
    before: tokenizers.Tokenizer
    after: tokenizers.Tokenizer


def pruned(content: str, corpus: Sequence[str], others: dict[str, str] | None = None) -> Pruned:
    """Prune a tokenizer for some documents."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name, text in {"tokenizer.json": content, **(others or {})}.items():
            (place / name).write_bytes(text.encode())
        paths = [place / f"{number}.text" for number in range(len(corpus))]
        for path, text in zip(paths, corpus, strict=True):
            path.write_bytes(text.encode())
        with LocalDirectory(place) as files:
            tokenizer = read_tokenizer(files)
            count = count_tokens(tokenizer, paths)
            selection = select_tokens(tokenizer, corpus=count)
            written = rewritten_files(files, tokenizer, selection)
            new = written.files["tokenizer.json"]
            assert new is not None
            check = check_split(tokenizer, new, selection, paths)
    return Pruned(
        tokenizer=tokenizer,
        corpus=count,
        selection=selection,
        files=written,
        difference=check.difference,
        before=tokenizers.Tokenizer.from_str(content),
        after=tokenizers.Tokenizer.from_str(new.decode()),
    )


def byte_level(training: Sequence[str] = TRAINING, size: int = 420) -> str:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(training, trainer)
    return backend.to_str(pretty=True)


def byte_fallback(training: Sequence[str] = TRAINING, size: int = 200) -> str:
    """As converters from SentencePiece write it: every pair that spells a token is a merge, ordered by the token."""
    learner = tokenizers.Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    learner.train_from_iterator(training, trainers.BpeTrainer(vocab_size=size, show_progress=False))
    learned = sorted(learner.get_vocab().items(), key=lambda item: item[1])
    return sentencepiece_bpe([text for text, _ in learned])


def sentencepiece_bpe(pieces: Sequence[str], *, fuse_unk: bool = True) -> str:
    vocabulary = {text: number for number, text in enumerate(["<unk>", "<s>", *BYTES, *pieces])}
    merges = [
        (text[:cut], text[cut:])
        for text in pieces
        for cut in range(1, len(text))
        if text[:cut] in vocabulary and text[cut:] in vocabulary
    ]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=fuse_unk)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend.to_str()


def wordpiece(training: Sequence[str] = TRAINING, size: int = 180) -> str:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    backend.train_from_iterator(training, trainer)
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.enable_padding(length=8, pad_id=0, pad_token="[PAD]")
    backend.enable_truncation(8)
    return backend.to_str()


def unigram(training: Sequence[str] = TRAINING, size: int = 120) -> str:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=["<pad>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(training, trainer)
    backend.add_special_tokens([f"<extra_id_{number}>" for number in (2, 1, 0)])
    return backend.to_str()


def wordlevel(training: Sequence[str] = TRAINING) -> str:
    backend = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(training, trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False))
    return backend.to_str()


TRAINED: dict[str, Callable[[], str]] = {
    "byte-level BPE": byte_level,
    "BPE with byte fallback": byte_fallback,
    "WordPiece": wordpiece,
    "Unigram": unigram,
    "WordLevel": wordlevel,
}

texts = st.text(st.sampled_from(LETTERS + "x \n"), min_size=1, max_size=30)
"""Texts with letters that the drawn tokenizers know and one that they do not."""
corpora = st.lists(texts, min_size=1, max_size=4)
words = st.text(st.sampled_from(LETTERS), min_size=2, max_size=5)
added = st.lists(
    st.builds(
        tokenizers.AddedToken,
        st.sampled_from(["ab", "<x>", " b", "é"]),
        single_word=st.booleans(),
        lstrip=st.booleans(),
        rstrip=st.booleans(),
        normalized=st.booleans(),
        special=st.booleans(),
    ),
    unique_by=lambda token: token.content,
    max_size=3,
)
"""Added tokens, some of which are in the vocabulary too, and which match in some places only."""
vocabularies = st.lists(words, unique=True, max_size=25)


@st.composite
def drawn_byte_level(draw: st.DrawFn) -> str:
    """Merges in any order of ranks, and tokens that no merge makes, for `ignore_merges`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _drawn_merges(draw, ["a", "b", "c", "Ġ", "Ã", "©"], 20)
    whole = [text for text in draw(vocabularies) if text.isascii()]
    tokens = dict.fromkeys([*letters, *(left + right for left, right in merges), *whole])
    model = models.BPE(
        vocab={text: number for number, text in enumerate(tokens)},
        merges=draw(st.permutations(merges)),
        ignore_merges=draw(st.booleans()),
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=draw(st.booleans()))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(draw(added))
    return backend.to_str()


@st.composite
def drawn_byte_fallback(draw: st.DrawFn) -> str:
    pieces = [*draw(st.lists(st.sampled_from(LETTERS), unique=True)), "▁", *draw(vocabularies)]
    pieces += draw(st.lists(st.sampled_from(["▁▁", "▁a", "▁ab", "a▁", "▁▁▁▁"]), unique=True))
    return sentencepiece_bpe(list(dict.fromkeys(pieces)), fuse_unk=draw(st.booleans()))


@st.composite
def drawn_marked_bpe(draw: st.DrawFn, *, decodable: bool = False) -> str:
    """BPE with `##` before what continues a word or `</w>` after what ends one, and an unknown token.

    No decoder undoes both marks.
    """
    both = [] if decodable else [("##", "</w>")]
    prefix, suffix = draw(st.sampled_from([("##", ""), ("", "</w>"), ("", ""), *both]))
    known = draw(st.lists(st.sampled_from(LETTERS), unique=True, min_size=1))
    letters = [
        first + letter + last for letter in known for first in _unique("", prefix) for last in _unique("", suffix)
    ]
    starts = [letter for letter in letters if not (suffix and letter.endswith(suffix))]
    ends = [letter for letter in letters if not prefix or letter.startswith(prefix)] or letters
    tokens, merges = dict.fromkeys(["<unk>", *letters]), []
    for _ in range(draw(st.integers(0, 15)) if starts else 0):
        left, right = draw(st.sampled_from(starts)), draw(st.sampled_from(ends))
        joined = left + right[len(prefix) :]
        merges.append((left, right))
        tokens[joined] = None
        if not (suffix and joined.endswith(suffix)):
            starts.append(joined)
        if not prefix or joined.startswith(prefix):
            ends.append(joined)
    marks = {"continuing_subword_prefix": prefix} if prefix else {}
    marks |= {"end_of_word_suffix": suffix} if suffix else {}
    model = models.BPE(
        vocab={text: number for number, text in enumerate(tokens)},
        merges=merges,
        unk_token="<unk>",
        ignore_merges=draw(st.booleans()),
        **marks,
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if suffix:
        backend.decoder = decoders.BPEDecoder(suffix)
    else:
        backend.decoder = decoders.WordPiece(prefix, cleanup=False) if prefix else decoders.Fuse()
    return backend.to_str()


@st.composite
def drawn_wordpiece(draw: st.DrawFn, *, complete: bool = False) -> str:
    """Unless `complete`, some letters have no piece of their own, so that words become unknown in the middle."""
    first = list(LETTERS) if complete else draw(st.lists(st.sampled_from(LETTERS), unique=True))
    inside = list(LETTERS) if complete else draw(st.lists(st.sampled_from(LETTERS), unique=True))
    longer = [draw(st.sampled_from(["", "##"])) + word for word in draw(vocabularies)]
    tokens = dict.fromkeys(["[UNK]", *first, *(f"##{letter}" for letter in inside), *longer])
    backend = tokenizers.Tokenizer(
        models.WordPiece(vocab={text: number for number, text in enumerate(tokens)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_tokens(draw(added))
    return backend.to_str()


@st.composite
def drawn_unigram(draw: st.DrawFn, *, complete: bool = False) -> str:
    """Any scores: the lowest can be a long piece's, and equal ones occur."""
    falls_back = draw(st.booleans())
    letters = list(LETTERS + "▁") if complete else draw(st.lists(st.sampled_from(LETTERS + "▁"), unique=True))
    pieces = dict.fromkeys([*letters, *draw(vocabularies), "▁a"])
    scores = draw(st.lists(st.sampled_from([-1.0, -2.5, -4.0, -30.0]), min_size=len(pieces), max_size=len(pieces)))
    vocabulary = [("<unk>", 0.0), *((piece, -40.0) for piece in (BYTES if falls_back else []))]
    vocabulary += zip(pieces, scores, strict=True)
    backend = tokenizers.Tokenizer(models.Unigram(vocabulary, 0, falls_back))
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>"])
    backend.add_tokens(draw(added))
    return backend.to_str()


DRAWN: dict[str, st.SearchStrategy[str]] = {
    "byte-level BPE": drawn_byte_level(),
    "BPE with byte fallback": drawn_byte_fallback(),
    "BPE with marks": drawn_marked_bpe(),
    "WordPiece": drawn_wordpiece(),
    "Unigram": drawn_unigram(),
}
DECODABLE = DRAWN | {
    "BPE with marks": drawn_marked_bpe(decodable=True),
    "WordPiece": drawn_wordpiece(complete=True),
    "Unigram": drawn_unigram(complete=True),
}
"""Tokenizers in which every letter is a piece, or falls back to bytes, and whose decoder undoes every mark."""


def _unique(*marks: str) -> list[str]:
    return list(dict.fromkeys(marks))


def _drawn_merges(draw: st.DrawFn, letters: Sequence[str], most: int) -> list[tuple[str, str]]:
    known, merges = list(letters), dict[tuple[str, str], None]()
    for _ in range(draw(st.integers(0, most))):
        pair = (draw(st.sampled_from(known)), draw(st.sampled_from(known)))
        merges[pair] = None
        if pair[0] + pair[1] not in known:
            known.append(pair[0] + pair[1])
    return list(merges)


def parsed(data: bytes | None) -> Any:
    """The content of a JSON file that was written."""
    assert data is not None
    return json.loads(data)
