"""Runs an example on one process or on several, and reads what it printed and saved."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.edit.tokenizer.small_tokenizers import TRAINING, byte_level
from tests.torchrun import ROOT, under_torchrun

__all__ = [
    "TOKENS",
    "alone",
    "largest_difference",
    "losses",
    "losses_in",
    "tensors",
    "together",
    "write_model",
    "write_text",
]

TOKENS = 420
"""The rows that the tiny model's table has."""


def alone(example: str, *arguments: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
    """A run on one process, without torchrun."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1"), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "examples" / f"{example}.py"), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode != 0) is fails, done.stderr
    return done


def together(
    example: str, *arguments: str, processes: int = 2, fails: bool = False
) -> subprocess.CompletedProcess[str]:
    """A run by torchrun."""
    return under_torchrun(f"examples.{example}", *arguments, processes=processes, fails=fails)


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    """The losses in what the run printed, a line each."""
    return losses_in(done.stdout)


def losses_in(printed: str) -> list[float]:
    """The losses in a printed text, a line each."""
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", printed, re.MULTILINE)]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint's files."""
    return {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}


def largest_difference(one: Path, other: Path) -> float:
    """The largest difference of two checkpoints of the same tensors."""
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def write_model(place: Path) -> None:
    """A tiny tied Llama, with a tokenizer; its weights are large enough for attention to matter."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=TOKENS, tie_word_embeddings=True, **sizes, **heads)
    model: Any = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    model.save_pretrained(place)
    (place / "tokenizer.json").write_text(byte_level())
    (place / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def write_text(place: Path) -> None:
    """A text to train on."""
    place.write_text("\n".join(TRAINING), encoding="utf-8")
