"""The table of `bowline quantize` as a float matrix again, for formats that have no place for its codes.

The numbers are those that the codes stand for, in the dtype of their scales, which was the matrix's.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from bowline.checkpoint.checkpoint import CONFIG
from bowline.checkpoint.formats.dtypes import encode
from bowline.checkpoint.formats.quantised import QuantisedWeight, recognise
from bowline.edit.content import Bits, Content
from bowline.edit.draft import Draft, header_metadata
from bowline.errors import FormatError, TieError
from bowline.wording import byte_count

__all__ = ["is_own_table", "with_float_tables"]

MAKER = "bowline.quantize_tied"
CODES = ("._weight_qdata", ".table.values")
"""Endings of the names of a table's codes: in torchao's layout, and in that of `quantize_tied`."""


class _Dequantised(Content):
    """A quantised table's rows as numbers of the dtype of its scales."""

    def __init__(self, draft: Draft, table: QuantisedWeight) -> None:
        assert table.shape is not None
        self.table, self.stored = table, draft.source.stored_bytes
        self.dtype, self.shape = table.parts["scales"].dtype, table.shape

    def bits(self, start: int, stop: int) -> Bits:
        return encode(np.ascontiguousarray(self.table.rows(self.stored, start, stop).values), self.dtype)


def is_own_table(config: object) -> bool:
    """Whether a config says that `bowline quantize` or `quantize_tied` made its table."""
    entry = config.get("quantization_config") if isinstance(config, dict) else None
    return isinstance(entry, dict) and entry.get("quantized_by") == MAKER


def with_float_tables(draft: Draft) -> Draft:
    """The draft with its own tables as float matrices, or the draft itself if `bowline quantize` did not make it.

    Raises:
        FormatError: the config names a table that is not there, or is damaged.
        TieError: a float matrix is stored beside the table.
    """
    if not is_own_table(draft.config):
        return draft
    found = [(name, end) for name in draft.tensors for end in CODES if name.endswith(end)]
    if not found:
        raise FormatError(
            f"{draft.source.location}: {CONFIG} says that {MAKER} made a table, but no tensor holds its codes",
            help="quantise the model again",
        )
    edited = draft
    for codes, end in found:
        name, home = codes.removesuffix(end) + ".weight", draft.homes[codes]
        if name in draft.tensors:
            raise TieError(
                f"{name} is stored beside its quantised table ({codes})",
                help="remove one of them; `bowline audit` says which of them the loaders use",
            )
        said = header_metadata(draft.source, home)
        table = recognise(name, draft.source.tensors, draft.config, said, draft.source.stored_bytes)
        if table is None or table.problem is not None or table.shape is None or "scales" not in table.parts:
            reason = table.problem if table is not None else "its scales are not stored"
            raise FormatError(f"{name}: the table cannot be dequantised: {reason}", help="quantise the model again")
        matrix = _Dequantised(draft, table)
        for part in table.parts.values():
            edited = edited.without(part.name)
        edited = edited.with_tensor(name, matrix, home).with_notes(
            f"{name} was dequantised from {table.layout}: {byte_count(table.nbytes)} become "
            f"{byte_count(matrix.nbytes)} of {matrix.dtype}"
        )
        gone = {key: None for key in (name, "tensor_names") if key in said}
        edited = replace(edited, metadata={**edited.metadata, home: {**edited.metadata.get(home, {}), **gone}})
    config = {key: value for key, value in draft.config.items() if key != "quantization_config"}
    return edited.with_texts({CONFIG: (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()})
