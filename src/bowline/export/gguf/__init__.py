"""Writes a checkpoint as a GGUF file that llama.cpp runs, by blocks of rows; no torch.

A tied model gets no `output.weight`: llama.cpp then takes `token_embd.weight` for both ends.
"""

from bowline.export.gguf.gguf_export import export_gguf

__all__ = ["export_gguf"]
