"""The tokenizer of a checkpoint, built by the `tokenizers` library from the files that the checkpoint has."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from bowline.checkpoint import open_checkpoint
from bowline.checkpoint.formats.strict_json import loads
from bowline.checkpoint.places.file_set import FileSet
from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.errors import FormatError, NoCheckpointError, UsageError, how_to_install

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Tokenizer"]

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
WORDPIECE = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]"}
BYTE_LEVEL = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
MASKS = ("[MASK]", "<mask>")
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Decoding gives this character for bytes that form no character."""
SENTENCEPIECE = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model")


class Tokenizer:
    """Text to ids and back. `eos`, `pad` and `mask` are ids, or `None` if the checkpoint names no such token."""

    def __init__(self, backend: tokenizers.Tokenizer, roles: Mapping[str, str], config: Mapping[str, Any]) -> None:
        self.backend = backend
        backend.no_padding()
        backend.no_truncation()
        self.mask_token = roles.get("mask_token") or next((one for one in MASKS if self._id(one) is not None), None)
        self.mask = self._id(self.mask_token)
        self.eos = self._first(self._id(roles.get("eos_token")), config.get("eos_token_id"))
        self.pad = self._first(self._id(roles.get("pad_token")), config.get("pad_token_id"))

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> Self:
        """Load the tokenizer in a directory or a Hub repository.

        It is read from `tokenizer.json`, else from `vocab.json` and `merges.txt` (GPT-2's files), else from `vocab.txt`
        (BERT's file).

        Raises:
            UsageError: none of these files exists, or the library `tokenizers` is not installed.
            FormatError: one of the files cannot be read.
        """
        if Path(path).is_dir():
            return cls._read(LocalDirectory(path))
        with open_checkpoint(path) as checkpoint:
            return cls._read(checkpoint.files)

    @classmethod
    def _read(cls, files: FileSet) -> Self:
        try:
            import tokenizers
        except ModuleNotFoundError as error:
            if error.name != "tokenizers":
                raise
            raise UsageError(
                "tokenizers, the library that reads a checkpoint's tokenizer, is not installed",
                help=how_to_install("torch"),
            ) from None
        settings = _json(files, "tokenizer_config.json")
        config = _json(files, "config.json")
        roles = _roles(settings, _json(files, "special_tokens_map.json"))
        try:
            if files.has("tokenizer.json"):
                backend = tokenizers.Tokenizer.from_str(files.read("tokenizer.json").decode())
            elif files.has("vocab.json") and files.has("merges.txt"):
                roles = {**BYTE_LEVEL, **roles}
                backend = _byte_level(files, settings, roles)
            elif files.has("vocab.txt"):
                roles = {**WORDPIECE, "mask_token": "[MASK]", **roles}
                backend = _wordpiece(files, settings, roles)
            else:
                raise _none(files)
        except (NoCheckpointError, UsageError, FormatError):
            raise
        except Exception as error:  # the library raises plain `Exception`s
            raise FormatError(
                f"{files.location}: the tokenizer cannot be read: {error}",
                help="restore its files from the source of the checkpoint",
            ) from None
        return cls(backend, roles, config)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the special tokens that the checkpoint puts around a text.

        Raises:
            UsageError: not a string, or a string with lone surrogates, which Python makes of bytes that are not UTF-8.
        """
        try:
            return list(self.backend.encode(text).ids)
        except TypeError:
            raise UsageError(f"{text!r:.60}: expected a text that can be encoded in UTF-8") from None

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without special tokens."""
        return str(self.backend.decode(list(ids), skip_special_tokens=True))

    def token(self, token_id: int) -> str:
        """Return a token as the vocabulary writes it, or `""` for a row of the model that has no token."""
        return self.backend.id_to_token(token_id) or ""

    def beginning_with(self, text: str) -> set[int]:
        """Return the ids of the tokens whose own text begins with `text`."""
        texts = self.backend.decode_batch([[token] for token in range(len(self))], skip_special_tokens=True)
        return {token for token, own in enumerate(texts) if own.startswith(text)}

    def pieces(self, ids: Iterable[int], *, after: Sequence[int] = ()) -> Iterator[str]:
        """Yield the text of `ids` in pieces, each as soon as later tokens cannot change it.

        `after` are the ids before. A character of several bytes may consist of several tokens; it is yielded with the
        last of them.
        """
        window = list(after)[-8:]  # whole characters, on which the text of the next token can depend
        shown = len(self.decode(window))
        for token in ids:
            window.append(token)
            text = self.decode(window)
            open_ended = min(len(text) - len(text.rstrip(UNKNOWN)), 3)  # a character lacks at most three bytes
            whole = len(text) - open_ended
            if whole > shown:
                yield text[shown:whole]
                shown = whole
            if not open_ended and len(window) > 64:
                window = window[-8:]
                shown = len(self.decode(window))
        rest = self.decode(window)[shown:]
        if rest:
            yield rest

    def __len__(self) -> int:
        """Return the number of tokens, including added ones."""
        return int(self.backend.get_vocab_size())

    def _id(self, token: str | None) -> int | None:
        return self.backend.token_to_id(token) if token else None

    @staticmethod
    def _first(known: int | None, stated: Any) -> int | None:
        stated = stated[0] if isinstance(stated, list) and stated else stated
        return known if known is not None else stated if isinstance(stated, int) else None


def _json(files: FileSet, name: str) -> Mapping[str, Any]:
    """Return the object in a JSON file, or an empty one if the file does not exist."""
    content = loads(files.read(name), name, allow_nonfinite=True) if files.has(name) else {}
    if not isinstance(content, dict):
        raise FormatError(f"{name}: expected an object, got {type(content).__name__}", help=f"restore {name}")
    return content


def _roles(*contents: Mapping[str, Any]) -> dict[str, str]:
    """Return {role: token} from the first file that names each. A token is a string or an object with `content`."""
    roles: dict[str, str] = {}
    for content in contents:
        for role in ROLES:
            value = content.get(role)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                roles.setdefault(role, value)
    return roles


def _byte_level(files: FileSet, settings: Mapping[str, Any], roles: Mapping[str, str]) -> tokenizers.Tokenizer:
    """Build GPT-2's tokenizer: byte-level BPE, in which a space belongs to the word after it."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, processors

    lines = files.read("merges.txt").decode().split("\n")
    lines = [line for line in lines if line.strip() and not line.startswith("#version")]
    wrong = next((line for line in lines if line.count(" ") != 1), None)
    if wrong is not None:
        raise FormatError(
            f"merges.txt: {wrong!r:.60}, expected two parts with a space between them", help="restore merges.txt"
        )
    merges = [(left, right) for left, _, right in (line.rstrip("\r").partition(" ") for line in lines)]
    backend = Backend(models.BPE(vocab=dict(_json(files, "vocab.json")), merges=merges))
    prefix = bool(settings.get("add_prefix_space", False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.decoder = decoders.ByteLevel()
    _add_special(backend, files, settings, roles)
    return backend


def _wordpiece(files: FileSet, settings: Mapping[str, Any], roles: Mapping[str, str]) -> tokenizers.Tokenizer:
    """Build BERT's tokenizer: words and punctuation, cut into the longest pieces in the vocabulary."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    words = files.read("vocab.txt").decode().removesuffix("\n").split("\n")
    vocab = {word.rstrip("\r"): at for at, word in enumerate(words)}
    backend = Backend(models.WordPiece(vocab=vocab, unk_token=roles["unk_token"], max_input_chars_per_word=100))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(settings.get("tokenize_chinese_chars", True)),
        strip_accents=settings.get("strip_accents"),
        lowercase=bool(settings.get("do_lower_case", True)),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    _add_special(backend, files, settings, roles)
    begin, end = roles["cls_token"], roles["sep_token"]
    if backend.token_to_id(begin) is None or backend.token_to_id(end) is None:
        raise FormatError(f"vocab.txt: {begin} or {end} is missing", help="check that it is the vocabulary of a BERT")
    backend.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} $B:1 {end}:1",
        special_tokens=[(token, backend.token_to_id(token)) for token in (begin, end)],
    )
    return backend


def _add_special(
    backend: tokenizers.Tokenizer, files: FileSet, settings: Mapping[str, Any], roles: Mapping[str, str]
) -> None:
    """Add tokens that are never split: the files' added tokens, and special tokens that are in the vocabulary."""
    from tokenizers import AddedToken

    added = {token: at for token, at in _json(files, "added_tokens.json").items() if isinstance(at, int)}
    for at, entry in (settings.get("added_tokens_decoder") or {}).items():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str):
            added[entry["content"]] = int(at)
    special = set(roles.values())
    for token in sorted(added, key=added.__getitem__):
        one = AddedToken(token, special=token in special, normalized=False)
        (backend.add_special_tokens if token in special else backend.add_tokens)([one])
    known = [token for token in dict.fromkeys(roles.values()) if backend.token_to_id(token) is not None]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in known])


def _none(files: FileSet) -> UsageError:
    piece = next((name for name in SENTENCEPIECE if files.has(name)), None)
    if piece is None:
        return UsageError(
            f"{files.location}: no tokenizer, expected tokenizer.json, vocab.json with merges.txt, or vocab.txt",
            help="copy the tokenizer's files from the checkpoint that the model was made from",
        )
    return UsageError(
        f"{files.location}: its tokenizer is only in {piece}, and Bowline reads tokenizer.json",
        help="write one with transformers.AutoTokenizer.from_pretrained(dir).save_pretrained(dir), which needs "
        "sentencepiece",
    )
