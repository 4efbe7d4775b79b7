"""Reads the ties that a model's classes and configs declare, whether or not the tensors are shared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from bowline.errors import TieError
from bowline.nn.config.live_config import flag_of, text_config
from bowline.nn.tree.slots import Slot, named_modules
from bowline.nn.tree.table_slots import tie_ends
from bowline.tie import Tie, owner_chain

__all__ = ["Ties", "as_ties", "declared_ties"]

Ties: TypeAlias = Iterable[Tie | tuple[str, str]] | Mapping[str, str]
"""Ties as a caller may write them: `Tie`s, pairs `(target, source)`, or `{target: source}`."""

WRITTEN = "give Tie(target, source), (target, source) or {target: source}"
WORDS = ("ties", "_tied_weights_keys")
TENSOR_NAME = re.compile(r"[A-Za-z0-9_.]+\.(weight|bias)")


def declared_ties(
    model: nn.Module, *, flag: bool | None = None, known: Mapping[str, Slot] | None = None
) -> tuple[Tie, ...]:
    """The ties that the classes of `model` and its configs declare, at every nesting level, from their roots.

    A module declares ties by a class attribute `ties` (`Tie`s, pairs or `{target: source}`, in names of its own), or,
    as transformers does, by `_tied_weights_keys`: in version 5 a mapping of names, regular expressions or module
    prefixes; in version 4 a list of targets, whose sources are inferred. They are gated by `tie_word_embeddings`: of
    the module's own config for a mapping and for `ties` (a config that says nothing unties the former and not the
    latter); for a list, of its text decoder's, and biases not at all. `flag` answers in every config's place:
    `flag=True` gives what could be tied. `known` are `slots(model)`, where the caller has them already.

    Raises:
        TieError: declarations that contradict each other: two sources for one target, a cycle, a tie onto itself, a
            pattern that matches nothing.

    Example:
        >>> class Tiny(nn.Module):
        ...     ties = {"lm_head.weight": "wte.weight"}
        >>> declared_ties(Tiny())
        (Tie(target='lm_head.weight', source='wte.weight'),)
    """
    found: dict[str, str] = {}
    ends: dict[str, Slot] | None = None
    for prefix, module, own, keys in _stating(model):
        inside = prefix + "." if prefix else ""
        names: dict[str, Slot] = {}
        if keys and not _spelled_out(keys):
            ends = tie_ends(model, known) if ends is None else ends
            names = {name.removeprefix(inside): slot for name, slot in ends.items() if name.startswith(inside)}
        pairs = [*_own(inside, module, own, flag), *_transformers(module, keys, names, flag)]
        found |= {inside + tie.target: inside + tie.source for tie in pairs}  # of two words the inner one's, as there
    return as_ties(found)


def as_ties(ties: Ties) -> tuple[Tie, ...]:
    """Turn ties as a caller wrote them into `Tie`s, each with the owner of the matrix as its source.

    Raises:
        TieError: a tie onto itself, a cycle, two sources for one target, or something that is not a tie.
    """
    if not isinstance(ties, Iterable) and not isinstance(ties, Tie):
        raise TieError(f"ties={ties!r:.60}: expected ties", help=WRITTEN, argument="ties")
    pairs = ties.items() if isinstance(ties, Mapping) else [ties] if isinstance(ties, Tie) else ties
    made = []
    for pair in pairs:
        if isinstance(pair, Tie):
            made.append(pair)
        elif isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(name, str) for name in pair):
            made.append(Tie(*pair))
        else:
            raise TieError(f"{pair!r:.60}: expected a tie", help=WRITTEN)
    return _from_roots(made)


def _stating(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any, Any]]:
    """The modules that state `ties` or `_tied_weights_keys`, and what they state.

    An attribute of their own, and not one that a wrapper (torch.compile's, PEFT's) fetches from what it wraps.
    """
    wordy: dict[type[nn.Module], bool] = {}  # a model has many modules of few classes
    for prefix, module in named_modules(model):
        kind, own = type(module), module.__dict__
        if kind not in wordy:
            wordy[kind] = any(hasattr(kind, word) for word in WORDS)
        if wordy[kind] or "ties" in own or "_tied_weights_keys" in own:
            ties, keys = (getattr(module, word) if word in own or hasattr(kind, word) else None for word in WORDS)
            if ties or keys:
                yield prefix, module, ties, keys


def _own(inside: str, module: nn.Module, ties: Any, flag: bool | None) -> Iterator[Tie]:
    if not isinstance(ties, (Mapping, list, tuple, set, frozenset, Tie)):
        return  # another library's attribute of that name
    stated = flag if flag is not None else flag_of(module.__dict__.get("config"))
    if stated is not False:
        try:
            yield from as_ties(cast(Ties, ties))
        except TieError as error:
            if "ties" not in module.__dict__:  # on the class, so it is a declaration; else it may be anybody's
                raise TieError(f"{inside}ties: {error.message}", help=error.help) from None


def _transformers(module: nn.Module, keys: Any, names: Mapping[str, Slot], flag: bool | None) -> Iterator[Tie]:
    config = module.__dict__.get("config")
    if isinstance(keys, Mapping):
        if flag if flag is not None else flag_of(config):
            yield from _mapped(keys, names)
    elif isinstance(keys, (list, tuple, set, frozenset)):
        stated = flag if flag is not None else flag_of(text_config(config))
        yield from _listed(module, [str(key) for key in keys], names, stated is not False)


def _spelled_out(keys: Any) -> bool:
    """Whether there are only names, and nothing that has to be matched against the model's."""
    return isinstance(keys, Mapping) and all(TENSOR_NAME.fullmatch(name) for pair in keys.items() for name in pair)


def _mapped(keys: Mapping[str, str], names: Mapping[str, Slot]) -> Iterator[Tie]:
    """transformers 5: names as they are; patterns and module prefixes matched from the start of each name."""
    if _spelled_out(keys):
        yield from (Tie(target, source) for target, source in keys.items())
        return
    expanded: dict[str, str] = {}
    for target, source in keys.items():
        targets = sorted(name for name in names if re.search("^" + target, name))
        sources = sorted(name for name in names if re.search("^" + source, name))
        if not targets or not sources or len(targets) % len(sources):
            raise TieError(
                f"{target} <- {source}: {len(targets)} targets and {len(sources)} sources match, "
                "expected the same number of targets for each source",
                help="correct the class's _tied_weights_keys",
            )
        for one, other in zip(targets, cycle(sources), strict=False):
            expanded[one] = expanded.get(other, other)  # a later pattern overrides an earlier one, as there
    yield from (Tie(one, other) for one, other in expanded.items() if one != other)


def _listed(module: nn.Module, keys: list[str], names: Mapping[str, Slot], flag: bool) -> Iterator[Tie]:
    """transformers 4: only the targets are listed. A weight borrows the input embedding; a bias, the one outside."""
    targets = [name for name in names if any(re.search(key, name) for key in keys)]
    owners = {name: slot for name, slot in names.items() if name not in targets}
    table = _input_embedding(module)
    for target in targets:
        held = names[target].tensor
        is_bias = held.ndim == 1
        if not is_bias and not flag:
            continue
        source = next((name for name, slot in owners.items() if slot.tensor is held), None)
        if source is None and is_bias:
            source = next((name for name in _one_shorter(target) if name in owners), None)
        elif source is None:
            source = next((name for name, slot in owners.items() if slot.tensor is table), None)
        if source is not None and owners[source].tensor.shape == held.shape:
            yield Tie(target, source)


def _input_embedding(module: nn.Module) -> torch.Tensor | None:
    try:
        return cast(torch.Tensor, module.get_input_embeddings().weight)  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return None


def _one_shorter(name: str) -> Iterator[str]:
    """The name without one of its parts, innermost first: `a.b.bias` gives `a.bias`, then `b.bias`."""
    parts = name.split(".")
    for at in range(len(parts) - 2, -1, -1):
        yield ".".join(parts[:at] + parts[at + 1 :])


def _from_roots(ties: Iterable[Tie]) -> tuple[Tie, ...]:
    """Each target once, with the owner at the end of its chain as its source; the same tie may be declared twice."""
    ties = list(ties)
    sources: dict[str, str] = {}
    for tie in ties:
        if tie.target == tie.source:
            raise TieError(f"{tie}: ties a tensor to itself", help="give the tensor that owns the matrix as the source")
        sources.setdefault(tie.target, tie.source)
    for tie in ties:
        if _root(tie.source, sources) != _root(tie.target, sources):
            raise TieError(
                f"{tie.target} has two sources, {sources[tie.target]} and {tie.source}, expected one",
                help="tie the two sources to each other, or leave one out",
            )
    return tuple(Tie(target, _root(target, sources)) for target in sources)


def _root(name: str, sources: Mapping[str, str]) -> str:
    """The owner at the end of the chain; raise a `TieError` if the chain is a cycle."""
    chain = owner_chain(name, sources)
    if chain[-1] in chain[:-1]:
        raise TieError(
            f"{' <- '.join(chain)}: these ties form a cycle",
            help="leave out one of them, so that one tensor owns the matrix",
        )
    return chain[-1]
