"""Reads GGUF, the format of llama.cpp: the header, its arrays of texts on demand, and the rows of tables."""

__all__ = ["GGUF_SUFFIX"]

GGUF_SUFFIX = ".gguf"
"""The end of a GGUF file's name."""
