"""Another float dtype, on disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from bowline.checkpoint.checkpoint import CONFIG
from bowline.edit.content import Cast
from bowline.edit.draft import Draft
from bowline.edit.row_selection import refuse_quantised, vocabulary_of
from bowline.errors import UsageError
from bowline.families.config_levels import config_levels

__all__ = ["DTYPES", "CastStep"]

DTYPES = {"bf16": "BF16", "f16": "F16", "f32": "F32"}
"""The names on the command line, and safetensors'."""
IN_CONFIG = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
KEYS = ("dtype", "torch_dtype")


@dataclass(frozen=True, slots=True)
class CastStep:
    """Every float tensor in another dtype, or those of the vocabulary alone."""

    dtype: str
    only: Literal["vocabulary"] | None = None
    verb: ClassVar[str] = "cast"

    def __str__(self) -> str:
        return f"cast --dtype {self.dtype}" + (f" --only {self.only}" if self.only else "")

    def apply(self, draft: Draft) -> Draft:
        """The draft in that dtype, and the config that says so. Integers, booleans and 8-bit floats stay.

        Raises:
            UsageError: an unknown dtype.
            TieError: a table is quantised.
        """
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype={self.dtype!r}: expected {', '.join(DTYPES)}", argument="dtype")
        if self.only not in (None, "vocabulary"):
            raise UsageError(f"only={self.only!r}: expected 'vocabulary'", argument="only")
        dtype = DTYPES[self.dtype]
        refuse_quantised(draft, ())
        chosen = vocabulary_of(draft).axes if self.only else draft.tensors
        tensors = {
            name: Cast(content, dtype) if name in chosen and content.dtype in FLOATS - {dtype} else content
            for name, content in draft.tensors.items()
        }
        edited = replace(draft, tensors=tensors)
        if self.only:
            return edited
        stated = {
            (*keys, key): IN_CONFIG[dtype]
            for keys, level in config_levels(draft.config)
            for key in KEYS
            if isinstance(level.get(key), str) and level[key] != IN_CONFIG[dtype]
        }
        return edited.with_values(CONFIG, stated)
