"""Finds the merges and the intermediate tokens that BPE needs to build a set of tokens.

No merge that BPE applies to a text crosses the border of a final token. So the merges inside a final token are those
that BPE applies to the token's own characters, and the closure of the final tokens holds every merge applied to the
text. Each step of BPE takes the lowest rank, so merges that were never applied can go without a change of the split.
More merges than needed do no harm, as long as the old tokenizer had them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.formats.strict_json import shown
from bowline.errors import FormatError

__all__ = ["MergeClosure", "by_merges", "by_scores"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeClosure:
    """The tokens that were asked for and those on the way to them, and the positions (R,) of the merges, ascending."""

    tokens: frozenset[int]
    merges: npt.NDArray[np.int64]


def by_merges(
    ids: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    kept: Iterable[int],
    *,
    prefix: str = "",
    suffix: str = "",
) -> MergeClosure:
    """The closure under BPE's ranked merges, as in `tokenizer.json` and in GGUF files of the model `gpt2`.

    A token that one merge makes needs that merge. For one that several merges make, BPE runs on its own characters;
    if that does not give the token, all of them stay.

    Arguments:
        ids: the id of each token.
        merges: pairs of tokens by rank. A pair that occurs twice has its last rank, as in the `tokenizers` library.
        kept: the ids of the tokens to build.
        prefix: what stands before a token that continues a word, and is left out when it is merged to another.
        suffix: what stands after a token that ends a word.

    Raises:
        FormatError: a merge takes or makes a text that is not a token.

    Example:
        >>> ids = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5}
        >>> closure = by_merges(ids, [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")], [5])
        >>> sorted(closure.tokens), closure.merges.tolist()
        ([0, 1, 2, 3, 5], [0, 2])
    """
    size = max(ids.values(), default=-1) + 1
    try:
        left = np.array([ids[pair[0]] for pair in merges], np.int64)
        right = np.array([ids[pair[1]] for pair in merges], np.int64)
        result = np.array([ids[first + second[len(prefix) :]] for first, second in merges], np.int64)
    except KeyError as error:
        raise FormatError(
            f"a merge takes or makes {shown(error.args[0])}, which is not a token", help="fetch the tokenizer again"
        ) from None
    pairs = left * size + right
    ways = _Ways(result, pairs, size)
    texts = {number: text for text, number in ids.items()}
    runner: _RankedMerges | None = None
    tokens = set(kept)
    waiting = list(tokens)
    used: set[int] = set()
    while waiting:
        token = waiting.pop()
        positions = ways.to(token)
        if len(positions) == 0:
            continue
        if len(positions) > 1:
            runner = runner or _RankedMerges(pairs, result, size)
            applied = runner.applied(token, texts[token], ids, prefix, suffix)
            positions = positions if applied is None else np.array(applied)
        used.update(pairs[positions].tolist())
        for reached in (left, right):
            for part in reached[positions].tolist():
                if part not in tokens:
                    tokens.add(part)
                    waiting.append(part)
    positions = np.flatnonzero(np.isin(pairs, np.fromiter(used, np.int64, len(used))))
    return MergeClosure(tokens=frozenset(tokens), merges=positions)


def by_scores(ids: Mapping[str, int], scores: Mapping[int, float], kept: Iterable[int]) -> frozenset[int]:
    """The closure where neighbours whose concatenation is a token merge, highest score first: GGUF's model `llama`.

    Arguments:
        ids: the id of each token.
        scores: the score of each id.
        kept: the ids of the tokens to build.

    Example:
        >>> ids = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5}
        >>> sorted(by_scores(ids, {3: -1.0, 4: -2.0, 5: -3.0}, [5]))
        [3, 5]
    """
    texts = {number: text for text, number in ids.items()}
    tokens = set(kept)
    for token in list(tokens):
        text = texts.get(token, "")
        if len(text) > 2:
            tokens.update(_scored_merges(text, ids, scores))
    return frozenset(tokens)


class _Ways:
    """The positions of the merges that make each token."""

    def __init__(self, result: npt.NDArray[np.int64], pairs: npt.NDArray[np.int64], size: int) -> None:
        self.order = np.argsort(result, kind="stable")
        self.starts = np.searchsorted(result[self.order], np.arange(size + 1))
        self.size = size

    def to(self, token: int) -> npt.NDArray[np.int64]:
        if token >= self.size:
            return self.order[:0]
        return self.order[self.starts[token] : self.starts[token + 1]]


class _RankedMerges:
    """BPE on a single word, by ids."""

    def __init__(self, pairs: npt.NDArray[np.int64], result: npt.NDArray[np.int64], size: int) -> None:
        self.ranks = {pair: rank for rank, pair in enumerate(pairs.tolist())}
        self.result = result.tolist()
        self.size = size

    def applied(self, token: int, text: str, ids: Mapping[str, int], prefix: str, suffix: str) -> list[int] | None:
        """The ranks of the merges that build the token from its characters, or `None` if they build another."""
        for symbols in _first_symbols(text, prefix, suffix):
            numbers = [ids.get(symbol, -1) for symbol in symbols]
            if -1 not in numbers:
                applied, left = self._run(numbers)
                if left == [token]:
                    return applied
        return None

    def _run(self, symbols: list[int]) -> tuple[list[int], list[int]]:
        """The ranks in the order in which they are applied, and the ids that remain."""
        count = len(symbols)
        before, after = list(range(-1, count - 1)), list(range(1, count + 1))
        heap: list[tuple[int, int]] = []

        def consider(at: int) -> None:
            if at >= 0 and after[at] < count:
                rank = self.ranks.get(symbols[at] * self.size + symbols[after[at]])
                if rank is not None:
                    heappush(heap, (rank, at))

        for at in range(count):
            consider(at)
        applied: list[int] = []
        while heap:
            rank, at = heappop(heap)
            next_one = after[at]
            if symbols[at] < 0 or next_one >= count:
                continue
            if self.ranks.get(symbols[at] * self.size + symbols[next_one]) != rank:
                continue
            applied.append(rank)
            symbols[at], symbols[next_one] = self.result[rank], -1
            after[at] = after[next_one]
            if after[at] < count:
                before[after[at]] = at
            consider(before[at])
            consider(at)
        return applied, [symbol for symbol in symbols if symbol >= 0]


def _first_symbols(text: str, prefix: str, suffix: str) -> Iterator[list[str]]:
    """What BPE can start from to build a token: its characters, with the marks of their place in the word."""
    starts = [(text, "")]
    if prefix and text.startswith(prefix) and len(text) > len(prefix):
        starts.insert(0, (text[len(prefix) :], prefix))
    for body, first_mark in starts:
        ends = [(body, "")]
        if suffix and body.endswith(suffix) and len(body) > len(suffix):
            ends.insert(0, (body[: -len(suffix)], suffix))
        for inner, last_mark in ends:
            symbols = [(prefix if at else first_mark) + character for at, character in enumerate(inner)]
            yield [*symbols[:-1], symbols[-1] + last_mark]


def _scored_merges(text: str, ids: Mapping[str, int], scores: Mapping[int, float]) -> set[int]:
    """The ids of the tokens that arise while a text's characters merge by score."""
    symbols = list(text)
    count = len(symbols)
    before, after = list(range(-1, count - 1)), list(range(1, count + 1))
    heap: list[tuple[float, int, str, int]] = []

    def merged(at: int) -> tuple[float, int, str, int] | None:
        if at < 0 or after[at] >= count:
            return None
        joined = symbols[at] + symbols[after[at]]
        token = ids.get(joined)
        return None if token is None else (-scores.get(token, 0.0), at, joined, token)

    heap = [found for at in range(count) if (found := merged(at)) is not None]
    heapify(heap)
    made: set[int] = set()
    while heap:
        _, at, joined, token = heappop(heap)
        next_one = after[at]
        if not symbols[at] or next_one >= count or symbols[at] + symbols[next_one] != joined:
            continue
        made.add(token)
        symbols[at], symbols[next_one] = joined, ""
        after[at] = after[next_one]
        if after[at] < count:
            before[after[at]] = at
        heap_entries = (merged(before[at]), merged(at))
        for entry in heap_entries:
            if entry is not None:
                heappush(heap, entry)
    return made
