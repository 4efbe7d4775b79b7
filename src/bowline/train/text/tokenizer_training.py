"""The tokenizer of a new model: trained on its text with the `tokenizers` library, or taken from a directory.

    gpt2, lstm   byte-level BPE (Radford et al., 2019): every text has tokens, <|endoftext|> stands between documents
    bert         WordPiece (Devlin et al., 2018), cased: words and punctuation, the spaces between them are lost
    t5           Unigram (Kudo, 2018) with the sentinels <extra_id_0>, <extra_id_1>, ... as the last ids, counting down

The same text gives the same tokenizer. For BERT and T5 the library would number pieces in the order of its hash tables,
which is random; here letters are numbered first, and pieces by their score.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from bowline.checkpoint import open_checkpoint
from bowline.checkpoint.formats.strict_json import loads
from bowline.checkpoint.places.file_set import FileSet
from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.errors import UsageError
from bowline.models.common.tokenizer import Tokenizer

__all__ = ["TextTokenizer", "take_tokenizer", "train_tokenizer"]

SAMPLE = 2**25
"""The most characters to train a tokenizer on. From a longer text, evenly spaced documents are used."""
END = "<|endoftext|>"
OF_BERT = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
OF_BERT |= {"mask_token": "[MASK]"}
OF_T5 = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
SENTINEL = re.compile(r"<extra_id_(\d+)>")
SENTINELS = 100
"""The number of sentinels, as in T5. In a vocabulary of fewer than 2000 tokens it is one in twenty."""
WORDS = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's pattern without English contractions. It keeps runs of spaces together, as in indented code."""
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
"""The files to keep of an existing tokenizer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TextTokenizer:
    """A tokenizer for training: text to ids, and the ids of special tokens, `None` for those it does not have.

    `separator` ends each packed document. `sentinels` are T5's, <extra_id_0> first. `files` are the files of a
    directory from which Bowline and transformers load the same tokenizer.
    """

    backend: tokenizers.Tokenizer
    files: Mapping[str, bytes]
    separator: int
    eos: int | None = None
    pad: int | None = None
    mask: int | None = None
    begin: int | None = None
    sentinels: tuple[int, ...] = ()
    special: frozenset[int] = field(default_factory=frozenset)

    def __len__(self) -> int:
        """Return the number of rows that an embedding of these tokens needs."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens. A special token written in a text is plain text."""
        self.backend.encode_special_tokens = True
        return [one.ids for one in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def save(self, directory: Path) -> None:
        """Write the files into `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (directory / name).write_bytes(content)


def train_tokenizer(
    family: str, documents: Iterable[str], vocab_size: int, *, characters: int = 0, exactly: bool = False
) -> TextTokenizer:
    """Train the tokenizer of a family, with at most `vocab_size` tokens.

    Args:
        family: gpt2, lstm, bert or t5.
        documents: the text, read once.
        vocab_size: the size of the vocabulary, including special tokens.
        characters: the number of characters in all documents; above 2^25, only some documents are used.
        exactly: raise an error if the text supports fewer tokens; otherwise return as many as it supports.

    Raises:
        UsageError: a vocabulary too small for the letters that it begins with, or larger than the text supports.

    Example:
        >>> made = train_tokenizer("gpt2", ["def knot(rope):\\n    return rope\\n"] * 9, 270)
        >>> len(made), made.backend.decode(made.encode(["return knot"])[0])
        (270, 'return knot')
    """
    least = {"gpt2": 257, "lstm": 257}.get(family, 64)
    if vocab_size < least:
        raise UsageError(
            f"vocab_size={vocab_size}: expected at least {least}"
            + (", for the 256 bytes and one special token" if least == 257 else ""),
            help="give a larger --vocab-size",
            argument="vocab_size",
        )
    sample = list(_sample(documents, characters))
    make = {"gpt2": _byte_level, "lstm": _byte_level, "bert": _wordpiece, "t5": _unigram}[family]
    backend, roles = make(sample, vocab_size)
    if exactly and backend.get_vocab_size() < vocab_size:
        raise UsageError(
            f"vocab_size={vocab_size}: the text is enough for only {backend.get_vocab_size()} tokens",
            help="leave --vocab-size out to use as many tokens as the text gives, or add more text",
            argument="vocab_size",
        )
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
    config["clean_up_tokenization_spaces"] = False
    files = {
        "tokenizer.json": backend.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2, sort_keys=True) + "\n").encode(),
    }
    return _known(family, backend, {name: value for name, value in roles.items() if isinstance(value, str)}, files)


def take_tokenizer(family: str, path: str | os.PathLike[str], *, asked_for: bool = False) -> TextTokenizer:
    """Load the tokenizer of a directory or a Hub repository, for a model of `family`.

    `asked_for` says that the user gave it with `--tokenizer`, for errors.

    Raises:
        UsageError: there is no tokenizer, or it lacks a special token that training the family needs.
        FormatError: the tokenizer cannot be read.
    """
    backend = Tokenizer.from_pretrained(path).backend
    if Path(path).is_dir():
        return _taken(family, backend, LocalDirectory(path), asked_for)
    with open_checkpoint(path) as checkpoint:
        return _taken(family, backend, checkpoint.files, asked_for)


def _taken(family: str, backend: tokenizers.Tokenizer, source: FileSet, asked_for: bool) -> TextTokenizer:
    files = {name: source.read(name) for name in FILES if source.has(name)}
    roles: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        content = loads(files[name], name, allow_nonfinite=True) if name in files else {}
        for role, value in content.items() if isinstance(content, dict) else ():
            value = value.get("content") if isinstance(value, dict) else value
            if role.endswith("_token") and isinstance(value, str):
                roles[role] = value
    return _known(family, backend, roles, files, asked_for)


def _known(
    family: str,
    backend: tokenizers.Tokenizer,
    roles: Mapping[str, str],
    files: Mapping[str, bytes],
    asked_for: bool = False,
) -> TextTokenizer:
    usual = {"bert": OF_BERT, "t5": OF_T5}.get(family, {"eos_token": END})

    def found(role: str, *, needed: bool) -> int | None:
        names = [name for name in (roles.get(role), usual.get(role)) if name is not None]
        at = next((at for at in map(backend.token_to_id, names) if at is not None), None)
        if at is None and needed:
            _lacks(family, role, names, asked_for)
        return at

    vocabulary = backend.get_vocab(with_added_tokens=True)
    numbered = sorted((int(m[1]), at) for token, at in vocabulary.items() if (m := SENTINEL.fullmatch(token)))
    if family == "t5" and not numbered:
        _lacks(family, "sentinel", ["<extra_id_0>"], asked_for)
    ends = "sep_token" if family == "bert" else "eos_token"
    separator = found(ends, needed=True)
    assert separator is not None
    special = {at for at, token in backend.get_added_tokens_decoder().items() if token.special}
    special |= {at for role in {*roles, *usual} if (at := found(role, needed=False)) is not None}
    return TextTokenizer(
        backend=tokenizers.Tokenizer.from_str(backend.to_str()),
        files=files,
        separator=separator,
        eos=found("eos_token", needed=False),
        pad=found("pad_token", needed=family in ("bert", "t5")),
        mask=found("mask_token", needed=family == "bert"),
        begin=found("cls_token", needed=family == "bert"),
        sentinels=tuple(at for _, at in numbered),
        special=frozenset(special),
    )


def _lacks(family: str, role: str, names: list[str], asked_for: bool) -> NoReturn:
    other = "use a tokenizer of that family, or leave --tokenizer out to train one"
    raise UsageError(
        f"the tokenizer has no {role}{f' ({names[0]})' if names else ''}, which training a {family} needs",
        help=other if asked_for else "use a checkpoint whose tokenizer has it",
    )


def _sample(documents: Iterable[str], characters: int) -> Iterator[str]:
    stride, left = max(1, -(-characters // SAMPLE)), SAMPLE
    for at, document in enumerate(documents):
        if at % stride == 0 and left > 0:
            yield document[:left]
            left -= len(document)


def _byte_level(sample: list[str], vocab_size: int) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(sample, trainer)
    return backend, {"bos_token": END, "eos_token": END, "unk_token": END}


def _wordpiece(sample: list[str], vocab_size: int) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    cut = pre_tokenizers.BertPreTokenizer()
    sample, letters = _usual_letters([normalizer.normalize_str(text) for text in sample], vocab_size // 8)
    inside = [f"##{letter}" for letter in letters if len(cut.pre_tokenize_str(f"a{letter}")) == 1]
    first = [*OF_BERT.values(), *letters, *inside]  # the trainer would number them in a random order
    learner = tokenizers.Tokenizer(models.WordPiece(unk_token=OF_BERT["unk_token"]))
    learner.pre_tokenizer = cut
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=first, show_progress=False
    )
    learner.train_from_iterator(sample, trainer)
    vocabulary = json.loads(learner.to_str())["model"]["vocab"]
    model = models.WordPiece(vocab=vocabulary, unk_token=OF_BERT["unk_token"], max_input_chars_per_word=100)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer, backend.pre_tokenizer = normalizer, cut
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.add_special_tokens(list(OF_BERT.values()))
    begin, end = OF_BERT["cls_token"], OF_BERT["sep_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} $B:1 {end}:1",
        special_tokens=[(token, backend.token_to_id(token)) for token in (begin, end)],
    )
    return backend, dict(OF_BERT)


def _unigram(sample: list[str], vocab_size: int) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    sentinels = SENTINELS if vocab_size >= 2000 else max(vocab_size // 20, 4)
    sample, _ = _usual_letters(sample, vocab_size // 4)
    cut = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.Metaspace(prepend_scheme="never", split=False),
        ]
    )
    special = list(OF_T5.values())
    learner = tokenizers.Tokenizer(models.Unigram())
    learner.pre_tokenizer = cut
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - sentinels, special_tokens=special, unk_token=OF_T5["unk_token"], show_progress=False
    )
    learner.train_from_iterator(sample, trainer)
    scored = _levelled(dict(json.loads(learner.to_str())["model"]["vocab"]))
    pieces = sorted(scored.keys() - set(special), key=lambda piece: (-scored[piece], piece))
    vocabulary = [(piece, 0.0) for piece in special] + [(piece, scored[piece]) for piece in pieces]
    backend = tokenizers.Tokenizer(models.Unigram(vocabulary, special.index(OF_T5["unk_token"]), False))
    backend.pre_tokenizer = cut
    backend.decoder = decoders.Metaspace(prepend_scheme="never", split=False)
    backend.add_special_tokens(special)
    names = [f"<extra_id_{at}>" for at in range(sentinels)]
    backend.add_special_tokens(names[::-1])  # <extra_id_0> is the last row, as T5 has it
    end = OF_T5["eos_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, backend.token_to_id(end))]
    )
    return backend, {**OF_T5, "additional_special_tokens": names}


def _levelled(scored: dict[str, float]) -> dict[str, float]:
    """Return the scores, rounded, without their random part.

    The trainer gives letters that are not pieces themselves the lowest score, the next one 1e-4 more, and so on, in the
    random order of a hash table. Here all of them get the lowest score.
    """
    letters = [piece for piece in scored if len(piece) == 1]
    lowest = min(scored.values())
    chance = lowest + 1e-4 * len(letters)
    low = {piece for piece in letters if scored[piece] < chance}
    return {piece: round(lowest if piece in low else score, 4) for piece, score in scored.items()}


def _usual_letters(sample: list[str], most: int) -> tuple[list[str], list[str]]:
    """Replace rare characters of the text by spaces: those seen once, and those beyond the `most` frequent.

    Returns the text, and the characters that are left, sorted and without white space.
    """
    counts: Counter[str] = Counter()
    for text in sample:
        counts.update(text)
    usual = sorted((letter for letter in counts if counts[letter] > 1), key=lambda one: (-counts[one], one))[:most]
    rare = {ord(letter): " " for letter in counts.keys() - set(usual)}
    return [text.translate(rare) for text in sample] if rare else sample, sorted(
        letter for letter in usual if not letter.isspace()
    )
