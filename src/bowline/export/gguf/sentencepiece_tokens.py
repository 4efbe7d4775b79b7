"""BPE with byte fallback as llama.cpp reads it: a score for each token in place of the merges.

llama.cpp merges the neighbours whose joined text is the token with the highest score, the leftmost first. A list of
merges by rank, as `tokenizer.json` has it, does the same if each token's merges stand together in the list, and if
every two neighbours that spell a token are a merge. Both are checked. Known limitation: where two merges of one token
overlap, as `a + aa` and `aa + a` do, llama.cpp takes the left one, as SentencePiece does, and not that of lower rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bowline.checkpoint.formats.strict_json import shown
from bowline.edit.tokenizer import StoredTokenizer
from bowline.edit.tokenizer.stored_tokenizer import BYTE_PIECES
from bowline.errors import UsageError
from bowline.export.gguf.gguf_architecture import CONVERTER
from bowline.export.gguf.key_values import boolean, number, text
from bowline.export.gguf.token_types import (
    TokenizerKeys,
    TokenType,
    added_type,
    condition_notes,
    is_part,
    listed_tokens,
)

__all__ = ["LEADING_SPACE", "SPACE", "merged_pieces_keys", "word_start"]

SPACE = "▁"
MOST_CHARACTERS = 1024
"""The longest token of a BPE with byte fallback: each of its cuts is looked up."""
LEADING_SPACE = (
    "llama.cpp puts a space before every text, tokenizer.json only before a text that does not begin with one: such a "
    "text gets one space more"
)


def merged_pieces_keys(tokenizer: StoredTokenizer, rows: int) -> TokenizerKeys:
    """The keys of a BPE with byte fallback.

    Raises:
        UsageError: llama.cpp would split some text in another way.
    """
    missing = [piece for piece in BYTE_PIECES if piece not in tokenizer.ids]
    if missing:
        raise UsageError(
            f"tokenizer.json lacks {len(missing)} of the 256 byte pieces, the first {missing[0]}: llama.cpp stops at a "
            "character that needs one",
            help=CONVERTER,
        )
    if (
        tokenizer.model.get("ignore_merges") is True
        or tokenizer.prefix
        or tokenizer.suffix
        or tokenizer.model.get("dropout")
    ):
        raise UsageError(
            "tokenizer.json: model has ignore_merges, dropout or marks for parts of words, which llama.cpp does not "
            "know",
            help=CONVERTER,
        )
    types = dict(_types(tokenizer))
    prefixed, notes = _word_boundaries(tokenizer, types)
    keys = {
        "tokenizer.ggml.model": text("llama"),
        "tokenizer.ggml.pre": text("default"),
        **listed_tokens(tokenizer.texts, types, rows, _scores(tokenizer, types)),
        "tokenizer.ggml.add_space_prefix": boolean(prefixed),
    }
    unknown = next((token for token, kind in types.items() if kind is TokenType.UNKNOWN), None)
    if unknown is not None:
        keys["tokenizer.ggml.unknown_token_id"] = number(unknown)
    return TokenizerKeys(keys=keys, notes=(*notes, *condition_notes(tokenizer)))


def _types(tokenizer: StoredTokenizer) -> Iterator[tuple[int, TokenType]]:
    unknown = tokenizer.model.get("unk_token")
    for token, found in tokenizer.texts.items():
        if found == unknown:
            yield token, TokenType.UNKNOWN
        elif found in BYTE_PIECES:
            yield token, TokenType.BYTE
        elif token not in tokenizer.added or (SPACE in found and not tokenizer.added[token]):
            yield token, TokenType.NORMAL  # an added token with a mark for spaces: raw text has none, so merges make it
        else:
            yield token, added_type(tokenizer, token)


def _scores(tokenizer: StoredTokenizer, types: dict[int, TokenType]) -> dict[int, float]:
    """The score of each token: the sooner its merges, the higher.

    Raises:
        UsageError: no scores split text as these merges do.
    """
    normal = {tokenizer.texts[token] for token, kind in types.items() if kind is TokenType.NORMAL}
    longest = max(normal, key=len, default="")
    if len(longest) > MOST_CHARACTERS:
        raise UsageError(
            f"tokenizer.json: the token {shown(longest)} is longer than {MOST_CHARACTERS} characters",
            help="remove it: no text of ordinary length contains it",
        )
    first: dict[str, int] = {}
    grown = _grown_runs(tokenizer, normal)
    latest: dict[str, int] = {}
    newest: dict[str, str] = {}  # what was made last, by the character that it repeats, if it does
    before = ""  # what was made last of all
    for rank, (left, right) in enumerate(tokenizer.merges):
        made = left + right
        if made not in normal:
            continue
        run = _repeated(made)
        group = run if run in grown else made
        # Runs of different characters, such as tabs and newlines, share no neighbours: their order does not matter.
        rivals = {newest.get(run, group), newest.get("", group)} - {group} if run else {before or group} - {group}
        if group in latest and any(latest[rival] > latest[group] for rival in rivals):
            raise UsageError(
                f"tokenizer.json: model.merges[{rank}] makes {shown(made)} again after merges of other tokens, but "
                "llama.cpp has one score for each token",
                help=CONVERTER,
            )
        first.setdefault(made, rank)
        latest[group], newest[run], before = rank, group, group
    known_pairs = set(tokenizer.merges)
    lengths = {1, *map(len, normal)}
    for made in normal:
        for cut in sorted(length for length in lengths if 0 < length < len(made) and len(made) - length in lengths):
            left, right = made[:cut], made[cut:]
            if _is_symbol(left, normal) and _is_symbol(right, normal) and (left, right) not in known_pairs:
                raise UsageError(
                    f"tokenizer.json has no merge of {shown(left)} and {shown(right)}, but llama.cpp merges any two "
                    f"neighbours that spell a token, here {shown(made)}",
                    help=CONVERTER,
                )
    order = {made: -float(place) for place, made in enumerate(sorted(first, key=first.__getitem__))}
    return {token: order.get(found, 0.0) for token, found in tokenizer.texts.items()}


def _repeated(token: str) -> str:
    """The character that a token repeats; empty if it has several."""
    return token[0] if token == token[0] * len(token) else ""


def _grown_runs(tokenizer: StoredTokenizer, normal: set[str]) -> set[str]:
    """The characters whose runs grow from the left, one character at a time, whatever the order of their merges.

    Two characters are merged last of all, so that a run of two takes the third, and so on, before another run begins.
    """
    ranks = {pair: rank for rank, pair in reversed(list(enumerate(tokenizer.merges)))}
    lengths: dict[str, set[int]] = {}
    for token in normal:
        if len(token) > 1 and _repeated(token):
            lengths.setdefault(token[0], set()).add(len(token))
    found = set()
    for letter, known in lengths.items():
        if len(known) != max(known) - 1:  # a length between two and the longest is missing
            continue
        last = ranks.get((letter, letter))
        steps = [ranks.get((letter * (length - 1), letter)) for length in range(3, max(known) + 1)]
        if last is not None and all(one is not None and one < last for one in steps):
            found.add(letter)
    return found


def _is_symbol(part: str, normal: set[str]) -> bool:
    """Whether a part of a text can stand alone while llama.cpp merges."""
    return len(part) == 1 or part in normal


def _word_boundaries(tokenizer: StoredTokenizer, types: dict[int, TokenType]) -> tuple[bool, tuple[str, ...]]:
    """Whether a text gets a space in front, and notes on where that differs.

    Raises:
        UsageError: spaces are treated in a way that llama.cpp does not know.
    """
    normalizer, splitter = tokenizer.content.get("normalizer"), tokenizer.content.get("pre_tokenizer")
    steps = normalizer.get("normalizers") if is_part(normalizer, "Sequence") else [normalizer]
    steps = [step for step in steps if step is not None] if isinstance(steps, list) else [normalizer]
    replaces = bool(steps) and _replaces_spaces(steps[-1])
    prepends = len(steps) == 2 and is_part(steps[0], "Prepend") and steps[0].get("prepend") == SPACE
    if replaces and (len(steps) == 1 or prepends) and (splitter is None or _never_splits(splitter)):
        return prepends, ()
    start = word_start(splitter)
    if not steps and start is not None:
        prefixed, splits = start
        if splits:
            _check_no_inner_space(tokenizer, types)
        return prefixed, (LEADING_SPACE,) if prefixed else ()
    raise UsageError(
        f"tokenizer.json normalises by {shown(normalizer)} and splits by {shown(splitter)}, expected spaces that "
        f"become {SPACE!r} and nothing else",
        help=CONVERTER,
    )


def word_start(splitter: Any) -> tuple[bool, bool] | None:
    """Whether a Metaspace puts a space before a text, and whether it splits words; `None` for another splitter."""
    if not is_part(splitter, "Metaspace") or splitter.get("replacement", SPACE) != SPACE:
        return None
    scheme = splitter.get("prepend_scheme")
    if scheme is None:  # as older versions wrote it
        scheme = "always" if splitter.get("add_prefix_space", True) else "never"
    return scheme in ("always", "first"), splitter.get("split", True) is not False


def _check_no_inner_space(tokenizer: StoredTokenizer, types: dict[int, TokenType]) -> None:
    for token, found in tokenizer.texts.items():
        if types[token] is TokenType.NORMAL and SPACE in found[1:]:
            raise UsageError(
                f"tokenizer.json splits text at spaces, but the token {shown(found)} has one inside: llama.cpp would "
                "use it",
                help=CONVERTER,
            )


def _replaces_spaces(step: Any) -> bool:
    return is_part(step, "Replace") and step.get("pattern") == {"String": " "} and step.get("content") == SPACE


def _never_splits(splitter: Any) -> bool:
    """Whether it splits at spaces, of which the normalizer left none (Gemma's)."""
    return is_part(splitter, "Split") and splitter.get("pattern") == {"String": " "} and not splitter.get("invert")
