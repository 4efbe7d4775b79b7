"""One quantised table for both ends of a tie, on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bowline.checkpoint.checkpoint import CONFIG
from bowline.edit.content import Content
from bowline.edit.draft import Draft
from bowline.edit.quantised_rows import Int4Part, Int8Part, is_finite
from bowline.edit.row_selection import refuse_quantised
from bowline.edit.steps.tie_step import equal, made_ties
from bowline.errors import TieError, UsageError
from bowline.families.config_levels import config_levels
from bowline.tie import Tie

__all__ = ["QuantizeStep"]

INT4_GROUP = 32
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SCALED = ("gemma", "minicpm3")
"""Parts of the model types whose embeddings hold an `embed_scale` in a buffer (read in transformers 5.23)."""
MAKER = {"quantized_by": "bowline.quantize_tied"}
"""How the config says whose table it is, as after `save_checkpoint`."""


@dataclass(frozen=True, slots=True)
class QuantizeStep:
    """Store the tied matrix as codes, once: int8 as torchao's `Int8Tensor`, int4 as the table of `quantize_tied`.

    transformers 5 with torchao loads the int8 layout, and ties both ends to it. No tensor that
    torchao 0.18 stores in safetensors packs 4-bit codes and looks rows up, so only `load_checkpoint` reads the int4
    layout, and transformers refuses it. Gemma's int8 is stored so too: see `_has_scaled_embedding`.
    """

    dtype: str
    group_size: int | None = None
    verb: ClassVar[str] = "quantize"

    def __str__(self) -> str:
        return f"quantize --dtype {self.dtype}" + (f" --group-size {self.group_size}" if self.group_size else "")

    def apply(self, draft: Draft) -> Draft:
        """The draft with one table for the head, its source and what else is tied to it.

        Raises:
            UsageError: an unknown dtype, or a group size that does not divide the width.
            TieError: the model is not tied, has no float matrix, or is quantised already; or two ends differ.
        """
        if self.dtype not in ("int8", "int4"):
            raise UsageError(f"dtype={self.dtype!r}: expected int8 or int4", argument="dtype")
        refuse_quantised(draft, ())
        if draft.config.get("quantization_config") is not None:
            raise TieError(
                f"{draft.source.location}: {CONFIG} has a quantization_config, expected a model in float",
                help="quantise the model that it was made from",
            )
        ties = _ties(draft)
        name = ties[0].source
        matrix = draft.tensors[name]
        if matrix.dtype not in FLOATS or len(matrix.shape) != 2:
            raise TieError(f"{name}: is {matrix.dtype} {list(matrix.shape)}, expected a float matrix", help="cast it")
        size = self._size(matrix)
        if not is_finite(matrix):
            raise TieError(
                f"{name}: holds values that are not finite, expected numbers", help="mend the checkpoint first"
            )
        edited = draft
        for tie in ties:
            target = draft.tensors.get(tie.target)
            if target is not None and not equal(target, matrix):
                raise TieError(
                    f"{tie}: the ends differ, so one table cannot serve both",
                    help="`bowline tie --keep` chooses one; `bowline untie` keeps both",
                )
            edited = edited.without(tie.target)
        scaled = _has_scaled_embedding(draft)
        by_torchao = self.dtype == "int8" and not scaled
        edited = self._with_tensor(edited, name, size) if by_torchao else self._with_table(edited, name, size)
        own = _tie_by_own_names(edited)
        if own != ties[0]:
            raise TieError(
                f"{name}: is stored without the prefix of {draft.declaration.architecture}"
                + (f" ({own.source})" if own is not None else "")
                + ", and loaders find a table by its full name only",
                help="load the checkpoint with transformers and save it again, which writes full names",
            )
        if self.dtype == "int8" and scaled:
            edited = edited.with_notes(
                f"transformers 5.23 loses the embed_scale of {draft.declaration.architecture} when it loads torchao's "
                "tensors, so the table is stored in a form that it refuses"
            )
        made = sum(edited.tensors[part].nbytes for part in edited.tensors if part not in draft.tensors)
        floats = matrix.nbytes * 2 // {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}[matrix.dtype]
        return edited.with_notes(
            f"{name}: {matrix.nbytes:,} bytes become {made:,}, {made / floats:.3f} of a 16-bit matrix's; the table "
            f"serves {', '.join(tie.target for tie in ties)} too"
        )

    def _size(self, matrix: Content) -> int:
        """The columns that share a scale."""
        width = matrix.shape[1]
        size = self.group_size if self.group_size is not None else INT4_GROUP if self.dtype == "int4" else width
        even = self.dtype == "int4"
        if size < 1 or width % size or (even and size % 2):
            raise UsageError(
                f"group_size={size}: expected {'an even' if even else 'a'} divisor of the width, {width}",
                help="32, 64 or 128 divide most models' widths",
                argument="group_size",
            )
        return size

    def _with_table(self, draft: Draft, name: str, size: int) -> Draft:
        """The table of `quantize_tied`, as `save_checkpoint` stores it."""
        matrix, home = draft.tensors[name], draft.homes[name]
        table = f"{name.removesuffix('.weight')}.table"
        draft = draft.without(name)
        by_row = self.dtype == "int8" and size == matrix.shape[1]
        parts: dict[str, Content] = (
            {part: Int4Part(matrix, size, part) for part in ("values", "scale", "zero")}
            if self.dtype == "int4"
            else {part: Int8Part(matrix, size, part, flat=by_row) for part in ("values", "scale")}
        )
        for part, content in parts.items():
            draft = draft.with_tensor(f"{table}.{part}", content, home)
        entry = {**MAKER, "dtype": self.dtype, **({} if by_row else {"group_size": size}), "tables": [table]}
        draft = draft.with_values(CONFIG, {("quantization_config",): entry})
        return draft.with_notes("bowline.load_checkpoint reads it; transformers refuses it")

    def _with_tensor(self, draft: Draft, name: str, size: int) -> Draft:
        """torchao's `Int8Tensor`, as transformers stores it."""
        matrix, home = draft.tensors[name], draft.homes[name]
        draft = draft.without(name)
        stem = name.removesuffix("weight")
        for part, content in (("qdata", "values"), ("scale", "scale")):
            draft = draft.with_tensor(f"{stem}_weight_{part}", Int8Part(matrix, size, content), home)
        by_row = size == matrix.shape[1]
        draft = draft.with_values(CONFIG, {("quantization_config",): _torchao_config(None if by_row else size)})
        record = {
            "_type": "Int8Tensor",
            "_data": {
                "act_quant_kwargs": None,
                "reduce_range": False,
                "block_size": [1, size],
                "dtype": {"_type": "torch.dtype", "_data": FLOATS[matrix.dtype]},
            },
            "_tensor_data_names": ["qdata", "scale"],
        }
        said = {name: json.dumps(record), "tensor_names": json.dumps([name])}
        draft = replace(draft, metadata={**draft.metadata, home: {**draft.metadata.get(home, {}), **said}})
        return draft.with_notes("transformers 5 with torchao reads it, and so does bowline.load_checkpoint")


def _has_scaled_embedding(draft: Draft) -> bool:
    """Whether transformers' embedding class holds its multiplier in a buffer that no file has.

    transformers 5.23 fills such a buffer only if the module's weight was not built from torchao's parts: with them,
    Gemma 3's `embed_scale` was 6e-44 in place of 4 (run with torchao 0.18).
    """
    types = [str(level.get("model_type", "")) for _, level in config_levels(draft.config)]
    return any(part in kind for kind in types for part in SCALED)


def _tie_by_own_names(draft: Draft) -> Tie | None:
    """The head's tie as the declaration names it where the matrix is no longer stored under its own name."""
    declaration = draft.declaration
    declared = declaration.find(declaration.head) if declaration.head else None
    return None if declared is None else declared.tie


def _ties(draft: Draft) -> list[Tie]:
    """The tie of the head, and the others of its source. Raises `TieError` if the config or the class says untied."""
    declaration = draft.declaration
    declared = declaration.find(declaration.head) if declaration.head else None
    if declared is None:
        raise TieError(
            f"{declaration.architecture or 'this model'} declares no tie of its head, so no table can serve both ends",
            help="`bowline audit` shows what it declares",
        )
    tie = declared.tie
    if tie not in made_ties(draft):
        raise TieError(
            f"{tie}: the model is untied, and one table would tie it",
            help="`bowline tie` makes equal ends one matrix, and --keep chooses between two",
        )
    if tie.source not in draft.tensors or not tie.source.endswith("weight"):
        raise TieError(f"{tie}: {tie.source} is not stored", help="`bowline tie` stores the matrix under its name")
    return [tie, *(other for other in made_ties(draft) if other.source == tie.source and other != tie)]


def _torchao_config(group_size: int | None) -> Mapping[str, Any]:
    """The `quantization_config` with which transformers loads the table by torchao, and converts nothing else."""
    granularity = ("PerRow", {"dim": -1}) if group_size is None else ("PerGroup", {"group_size": group_size})
    settings = {
        "group_size": None,
        "granularity": {"_type": granularity[0], "_version": 1, "_data": granularity[1]},
        "set_inductor_config": False,
    }
    return {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": settings}},
        "modules_to_not_convert": None,
        "include_input_output_embeddings": True,
        "untie_embedding_weights": False,
        **MAKER,
    }
