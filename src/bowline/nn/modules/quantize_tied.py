"""Quantises a tied matrix once for both ends, so that a tied model shrinks; and converts it back.

Quantising the head alone unties it: its int8 copy is stored beside the float embedding, and the model grows. Here the
shared matrix is quantised once, to int8 or int4, and both ends read it. For inference only: the matrix is then not a
parameter, gets no gradient, and is unknown to optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Literal

import torch
from torch import nn

from bowline.errors import TieError
from bowline.nn.modules.quantized_ends import quantized, unlike_what_it_computes
from bowline.nn.modules.table_form import TableForm
from bowline.nn.ties.declared_ties import Ties, as_ties
from bowline.nn.ties.ends import there
from bowline.nn.ties.module_sizes import tell_transformers
from bowline.nn.ties.shared_parameters import find_ties
from bowline.nn.ties.tensor_comparison import is_plain
from bowline.nn.tree.save_guard import guard_saves
from bowline.nn.tree.slots import Slot, slot, slots
from bowline.nn.tree.table_slots import SharedTable
from bowline.tie import Tie

__all__ = ["quantize_tied", "share_tables"]


def quantize_tied(
    model: nn.Module,
    ties: Ties | None = None,
    *,
    dtype: Literal["int8", "int4"] | torch.dtype = "int8",
    group_size: int | None = None,
) -> tuple[Tie, ...]:
    """Quantise each shared matrix once and share it between its ends, in place; returns the ties.

    With `dtype="int8"` an entry is its code times a scale, one for each row or, with a `group_size`, for each group of
    that many columns: 0.50 of bfloat16's bytes. With `"int4"` two codes share a byte, and each group of `group_size`
    columns (32 unless it is given) has a scale and a zero: 0.30 of the bytes. The equations are in `QuantizedTable` and
    `Int4Table`.

    `ties` are those found on an embedding (`find_ties`), unless they are given. Every module that holds the matrix is
    replaced: an `Embedding` by a `QuantizedEmbedding`, a `Linear` by a `QuantizedHead` with the bias it had. A subclass
    of `Embedding` that multiplies its rows by its `embed_scale` (Gemma, BART and relatives) is replaced by a lookup
    that does the same, if its output is that product for every id.

    The ends share one table, stored once as `<embedding>.table.values` and `.scale` (int4: and `.zero`). `find_ties`,
    `check_ties`, `resize_vocab` and `keep_tied` treat them as tied, by the names they had; `untie_weights` converts the
    table back to float first. `save_checkpoint` writes the table, and `load_checkpoint` reads it into a model that was
    built anew. transformers' `save_pretrained` raises, because `from_pretrained` cannot read the table. For inference
    only.

    Raises:
        UsageError: another dtype, or a group size that does not divide the width.
        TieError: no tie, ends that are not one parameter, a matrix that is not finite, or a module that does more than
            look up (and scale) or multiply, or holds the matrix by another name than `weight`; the model is as it was.

    Example:
        >>> model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9, bias=False)})
        >>> model["lm_head"].weight = model["wte"].weight
        >>> quantize_tied(model)
        (Tie(target='lm_head.weight', source='wte.weight'),)
        >>> {name: tensor.dtype for name, tensor in model.state_dict().items()}
        {'wte.table.values': torch.int8, 'wte.table.scale': torch.float32}
        >>> print(find_ties(model))
        lm_head.weight <- wte.weight SHARED
    """
    form = TableForm.asked(dtype, group_size)
    known = slots(model)
    if ties is None:
        floats = [tie for tie in find_ties(model) if there(tie, known)]
        wanted = tuple(tie for tie in floats if isinstance(known[tie.source].module, nn.Embedding))
    else:
        wanted = as_ties(ties)
    if not wanted:
        raise TieError(f"{type(model).__name__}: no matrix is shared", help="tie_weights(model) first")
    share_tables(model, wanted, {tie.source: form for tie in wanted}, ExitStack())
    return wanted


def share_tables(
    model: nn.Module, ties: tuple[Tie, ...], forms: Mapping[str, TableForm], undo: ExitStack, *, filled: bool = True
) -> None:
    """Replace the modules at the ends of `ties` by ends of one table for each matrix; `undo` puts them back.

    `forms` has the table's form for each source.

    Unless `filled`, the table is to be loaded, and the matrix is not quantised.
    """
    known = slots(model)
    fresh: dict[str, nn.Module] = {}
    for source in dict.fromkeys(tie.source for tie in ties):
        mine = [tie for tie in ties if tie.source == source]
        fresh |= _replacements(model, mine, known, forms[source], filled)
    undo.callback(tell_transformers, model)
    undo.callback(guard_saves, model, SharedTable)
    for path, module in fresh.items():
        parent, _, child = path.rpartition(".")
        home = model.get_submodule(parent)._modules
        undo.callback(home.__setitem__, child, home[child])
        home[child] = module
    guard_saves(model, SharedTable)
    tell_transformers(model)


def _replacements(
    model: nn.Module, ties: list[Tie], known: dict[str, Slot], form: TableForm, filled: bool
) -> dict[str, nn.Module]:
    """The replacement for each module that holds the matrix of these ties, by path."""
    source = slot(model, ties[0].source, known)
    for tie in ties:
        if slot(model, tie.target, known).tensor is not source.tensor:
            raise TieError(
                f"{tie}: the two ends are not one parameter, expected a tie", help="tie_weights(model) first"
            )
    ends = [source, *(end for end in known.values() if end.tensor is source.tensor and end.name != source.name)]
    for end in ends:
        _check(end)
    table = form.table(source.tensor, filled=filled)
    if not (table.scale.is_meta or bool(torch.isfinite(table.scale).all())):
        raise TieError(
            f"{source.name}: holds values that are not finite, expected numbers", help="mend the checkpoint first"
        )
    made: dict[int, nn.Module] = {}  # a module with two names is replaced by one module
    for end in ends:
        if id(end.module) not in made:
            made[id(end.module)] = quantized(end, table)
    return {end.name.removesuffix(".weight"): made[id(end.module)] for end in ends}


def _check(end: Slot) -> None:
    if not is_plain(end.tensor) or not end.tensor.is_floating_point():
        raise TieError(
            f"{end.name}: is {end.tensor.dtype} in a {type(end.tensor).__name__}, expected a plain float matrix",
            help="quantise before sharding, and once",
        )
    seen = unlike_what_it_computes(end)
    if seen is not None:
        raise TieError(
            f"{end.name}: belongs to {seen}, expected the weight of an Embedding or a Linear that does nothing more",
            help="quantise this model in the format of its runtime",
        )
