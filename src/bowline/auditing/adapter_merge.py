"""What PEFT's `merge_and_unload`, `merge_lora` and `bowline merge` make of an adapter at the ends of a tie.

Each case was run for Llama, GPT-2, Gemma 3, BERT and T5 in the versions named here. tests/parity/test_adapter_merges.py
runs them again and holds them against this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bowline.auditing.adapter_evidence import AdapterDelta, BaseModel, DeltaKind, End, Holds, Merge, MergedEnd
from bowline.wording import joined

__all__ = ["MERGE", "MERGE_LORA", "PEFTS_NAMES", "PEFT_RUN", "TRANSFORMERS_RUN", "nests", "predict_merges"]

PEFT_RUN, TRANSFORMERS_RUN = "0.21.2", "5.23.0"
"""The versions that the outcomes were seen in."""

PEFTS_NAMES = ("embed_tokens", "lm_head")
"""PEFT acts on `ensure_weight_tying` only if a target has one of these names."""
PEFT, MERGE_LORA, MERGE = "peft", "merge_lora", "bowline merge"
FACTORS = (DeltaKind.LORA, DeltaKind.DORA)
UNCHANGED = "neither end changes"


def predict_merges(
    base: BaseModel, deltas: Sequence[AdapterDelta], *, alike: bool | None, shared_copy: bool
) -> tuple[Merge, ...]:
    """The outcome in each tool: on a base that is tied, on one that is not, or on both where that is not known.

    `deltas` are those that PEFT loads, `alike` says whether they are one, and `shared_copy` whether PEFT makes one
    module of all trained copies (`ensure_weight_tying`).
    """
    states = (True, False) if base.tied is None else (base.tied,)
    return tuple(
        merge
        for tied in states
        for merge in (
            tuple(make(base, deltas, alike, shared_copy) for make in (_peft_tied, _ours_tied, _on_disk))
            if tied
            else _untied(base, deltas)
        )
    )


def _untied(base: BaseModel, deltas: Sequence[AdapterDelta]) -> tuple[Merge, ...]:
    """Each module gets its own change. Trained rows at a head that has a bias are trained without it."""
    changed = {delta.place.module for delta in deltas}
    known = not any(delta.kind is DeltaKind.OTHER for delta in deltas)
    ends = tuple(
        MergedEnd(
            place=place,
            holds=(Holds.OWN if known else Holds.OPEN) if place.module in changed else Holds.BASE,
        )
        for place in base.places
    )
    loses_bias = base.head_bias and any(
        delta.kind is DeltaKind.ROWS and delta.place.end is End.HEAD for delta in deltas
    )
    text = UNCHANGED if not deltas else "each end gets its own change" if known else "not known for this method"
    if loses_bias:
        text += "; the head's bias, which PEFT leaves out while the adapter is on, counts again"
    exact = None if not known else not loses_bias
    return tuple(
        Merge(tool=tool, tied_base=False, ends=ends, tie_stays=None, exact=exact, text=text)
        for tool in (PEFT, MERGE_LORA, MERGE)
    )


def _on_disk(base: BaseModel, deltas: Sequence[AdapterDelta], alike: bool | None, shared_copy: bool) -> Merge:
    """`bowline merge` makes the same of the files, and parts the ends without being asked.

    It leaves out what was trained in a module that no layer calls, so that a tie can stay.
    """
    rows = len(deltas) == 1 and deltas[0].kind is DeltaKind.ROWS  # trained for every end
    called = [delta for delta in deltas if rows or delta.place.module not in base.unused]
    made = replace(_ours_tied(base, called, alike, shared_copy), tool=MERGE)
    if made.tie_stays is False:
        text = "gives each end its own and sets the flag to false; --tied both makes each change on the shared matrix"
        made = replace(made, text=text)
    return made


def _peft_tied(base: BaseModel, deltas: Sequence[AdapterDelta], alike: bool | None, shared_copy: bool) -> Merge:
    kinds = {delta.kind for delta in deltas}
    changed = {delta.place.module for delta in deltas}
    words = joined([delta.place.module for delta in deltas])
    if not deltas:
        return _peft(base, Holds.BASE, UNCHANGED + ", and the tie stays", stays=True, exact=True)
    if nests(base, deltas):
        text = f"one of the two adapters of {words} is lost, and save_pretrained refuses the merged model"
        return _peft(base, Holds.OPEN, text, stays=None, exact=False)
    if _copies_beside_one_delta(deltas):
        return _parted_copies(base, deltas)
    if DeltaKind.OTHER in kinds or not (len(kinds) == 1 or kinds <= set(FACTORS)):
        return _peft(base, Holds.OPEN, "not known: this was not run", stays=None, exact=None)
    if kinds <= set(FACTORS):
        if len(deltas) == 1:
            text = (
                f"the shared matrix gets the change of {words}, so it reaches {base.others(words)}; the flag stays true"
            )
            return _peft(base, Holds.OTHERS, text, stays=True, exact=False, own=changed)
        if alike is None:
            text = f"the shared matrix gets the changes of {words} one after the other; the flag stays true"
            return _peft(base, Holds.OPEN, text, stays=True, exact=False)
        if alike and kinds == {DeltaKind.LORA}:
            times = "twice" if len(deltas) == 2 else f"{len(deltas)} times"
            return _peft(
                base,
                Holds.REPEATED,
                f"the shared matrix gets the one change {times}, once for each of {words}; the flag stays true",
                stays=True,
                exact=False,
            )
        text = f"the shared matrix gets the changes of {words} one after the other; the flag stays true"
        return _peft(base, Holds.SUM, text, stays=True, exact=False)
    if kinds == {DeltaKind.COPY}:
        if shared_copy:
            return _peft(
                base, Holds.OWN, "both ends get the one trained copy, and the tie stays", stays=True, exact=True
            )
        return _parted_copies(base, deltas)
    return _rows(base, deltas, alike, changed, words)


def _parted_copies(base: BaseModel, deltas: Sequence[AdapterDelta]) -> Merge:
    """Trained copies part the ends; a bias that the same flag ties is then lost at the next load, unless copied too.

    A delta beside them goes into the base's matrix, and so into every module that has no copy.
    """
    changed = {delta.place.module for delta in deltas}
    copies = [delta.place.module for delta in deltas if delta.kind is DeltaKind.COPY]
    reached = [place.module for place in base.places if place.module not in changed]
    matrices = "become matrices of their own" if len(copies) > 1 else "becomes its own matrix"
    text = f"{joined(copies)} {matrices}; the tie is undone and the flag set to false"
    loses_bias = base.bias_tied and not any(place.module in copies for place in base.places if place.end is End.HEAD)
    unused = sorted(set(copies) & base.unused)
    strays = bool(reached) and len(copies) < len(deltas)
    if loses_bias:
        text += "; the flag tied the head's bias too, which is stored once: the next load draws it afresh"
    if unused:
        text += f"; the next load ties the modules that look tokens up to {unused[0]}"
    if strays:
        text += f"; the other change reaches {joined(reached)} too"
    exact = not loses_bias and not unused and not strays
    return _peft(base, Holds.OTHERS if strays else Holds.BASE, text, stays=False, exact=exact, own=changed)


def nests(base: BaseModel, deltas: Sequence[AdapterDelta]) -> bool:
    """Whether a module has one adapter inside another: PEFT trains rows of a tied embedding for every end.

    A LoRA on another end of the tie then wraps them.
    """
    rows = [delta for delta in deltas if delta.kind is DeltaKind.ROWS]
    others = [delta for delta in deltas if delta.kind in FACTORS]
    one_each = len(rows) == 1 and len(rows) + len(others) == len(deltas) and bool(others)
    return one_each and rows[0].place is base.source and all(delta.place is not base.source for delta in others)


def _copies_beside_one_delta(deltas: Sequence[AdapterDelta]) -> bool:
    kinds = [delta.kind for delta in deltas]
    return (
        DeltaKind.COPY in kinds
        and sum(kind is not DeltaKind.COPY for kind in kinds) == 1
        and not (set(kinds) & {DeltaKind.ROWS, DeltaKind.OTHER})
    )


def _rows(base: BaseModel, deltas: Sequence[AdapterDelta], alike: bool | None, changed: set[str], words: str) -> Merge:
    """Trained rows: PEFT gives every end the rows of the input embedding, and only those."""
    bias = "; the head's bias, which PEFT leaves out while the adapter is on, counts again" if base.head_bias else ""
    of_source = [delta for delta in deltas if delta.place is base.source]
    if (len(deltas) == 1 and of_source) or alike:
        text = f"every end gets the trained rows, and the tie stays{bias}"
        return _peft(base, Holds.OWN, text, stays=True, exact=not base.head_bias)
    if len(deltas) == 1:
        text = f"the rows of {words} are written into the shared matrix, so they reach {base.others(words)}{bias}"
        return _peft(base, Holds.OTHERS, text, stays=True, exact=False, own=changed)
    text = f"the rows of {words} are written into the shared matrix one after the other; the last written stays{bias}"
    return _peft(base, Holds.ROWS_OF_SEVERAL, text, stays=True, exact=False)


def _peft(
    base: BaseModel, holds: Holds, text: str, *, stays: bool | None, exact: bool | None, own: set[str] | None = None
) -> Merge:
    """A merge by PEFT: every place `holds` that, those in `own` their own change."""
    ends = tuple(
        MergedEnd(place=place, holds=Holds.OWN if own and place.module in own else holds) for place in base.places
    )
    return Merge(tool=PEFT, tied_base=True, ends=ends, tie_stays=stays, exact=exact, text=text)


def _ours_tied(base: BaseModel, deltas: Sequence[AdapterDelta], alike: bool | None, shared_copy: bool) -> Merge:
    """`merge_lora` keeps a tie whose ends are trained alike, and otherwise refuses or, on request, parts them."""
    changed = {delta.place.module for delta in deltas}
    kinds = {delta.kind for delta in deltas}
    rows = kinds == {DeltaKind.ROWS}
    everywhere = len(changed) == len(base.places)
    one = (
        not deltas
        or (kinds == {DeltaKind.COPY} and shared_copy)
        or (rows and ((len(deltas) == 1 and deltas[0].place is base.source) or (everywhere and alike is True)))
        or (everywhere and alike is True and kinds == {DeltaKind.LORA})
    )
    stays: bool | None
    bias = rows and base.head_bias
    after = "; the head's bias, which PEFT leaves out while the adapter is on, counts again" if bias else ""
    if nests(base, deltas):
        holds, stays = Holds.OPEN, None
        text = "refuses: a module has one adapter inside another, and PEFT merges only the outer one"
    elif DeltaKind.OTHER in kinds or (DeltaKind.ROWS in kinds and len(kinds) > 1):
        holds, stays, text = Holds.OPEN, None, "not known: this was not run"
    elif one:
        holds = Holds.OWN if deltas else Holds.BASE
        text = "every end gets the one change once, and the tie stays" if deltas else UNCHANGED + ", and the tie stays"
        stays = True
    elif alike is None and len(deltas) > 1 and kinds <= {DeltaKind.LORA, DeltaKind.ROWS}:
        holds, stays = Holds.OPEN, None
        text = 'keeps the tie if the ends carry the same values, and otherwise refuses; on_tie="untie" parts them'
    else:
        holds, stays = Holds.BASE, False
        text = (
            'refuses, since one matrix cannot hold both ends; on_tie="untie" gives each end its own and sets the flag '
            "to false"
        )
    ends = tuple(
        MergedEnd(place=place, holds=Holds.OWN if not one and place.module in changed and stays is False else holds)
        for place in base.places
    )
    return Merge(
        tool=MERGE_LORA,
        tied_base=True,
        ends=ends,
        tie_stays=stays,
        exact=None if stays is None else not bias,
        text=text + after,
    )
