"""The classes that are written as GGUF, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping

from bowline.checkpoint.formats.strict_json import shown
from bowline.errors import UsageError
from bowline.export.gguf.gemma_layout import GEMMA, GEMMA2, GEMMA3
from bowline.export.gguf.gguf_architecture import Config, GGUFArchitecture
from bowline.export.gguf.gpt2_layout import GPT2
from bowline.export.gguf.llama_layout import LLAMA, QWEN2, QWEN3
from bowline.export.gguf.t5_layout import T5

__all__ = ["GGUF_CLASSES", "architecture_for"]

GGUF_CLASSES: Mapping[str, GGUFArchitecture] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "GPT2LMHeadModel": GPT2,
    "T5ForConditionalGeneration": T5,
    "MT5ForConditionalGeneration": T5,
}
"""The classes that are written, by transformers' name."""


def architecture_for(config: Config) -> GGUFArchitecture:
    """The architecture for a checkpoint's class.

    Raises:
        UsageError: no such class is known here, or its config has something that is not written.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    if name is None or name not in GGUF_CLASSES:
        raise UsageError(
            f"{shown(name)}: is not exported to GGUF, expected {', '.join(GGUF_CLASSES)}",
            help="convert it with llama.cpp's convert_hf_to_gguf.py, and audit the result with `bowline audit`",
        )
    entry = config.get("quantization_config")
    if entry:
        method = entry.get("quant_method") if isinstance(entry, dict) else entry
        raise UsageError(
            f"the weights are quantised (quant_method {shown(method)}), expected floats or a table of "
            "`bowline quantize`",
            help="export the model before it was quantised",
        )
    return GGUF_CLASSES[name]
