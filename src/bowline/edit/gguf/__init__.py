"""Edits of GGUF files: rows are kept or dropped as stored bytes, whatever their type, and never dequantised.

A row of a table is contiguous in every type of ggml, since blocks run along it. A `gguf_draft` holds each tensor as
`stored_rows`, and the keys that change; the steps (`tied_file`, `fewer_rows`) make a new draft of a draft, and
`gguf_plan` says what becomes of each file.
"""

from bowline.edit.gguf.gguf_plan import gguf_plan

__all__ = ["gguf_plan"]
