"""The smallest checkpoints that show one thing, written for the occasion, and what an audit says of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.auditing import Finding, audit
from bowline.checkpoint.formats.numpy_writer import Bits, save_safetensors

__all__ = [
    "BART",
    "BERT",
    "GPT2",
    "HEAD",
    "LLAMA",
    "LLAVA",
    "OWN",
    "ROWS",
    "T5",
    "UNKNOWN",
    "WTE",
    "Tensors",
    "bf16",
    "codes",
    "findings",
    "one",
    "shards",
    "snapshot",
    "table",
    "tied_gpt2",
    "write",
]

Tensors = Mapping[str, "npt.NDArray[Any] | Bits"]

ROWS = 64
WIDTH = 8
WTE, HEAD = "transformer.wte.weight", "lm_head.weight"


def config(architecture: str, model_type: str, **more: object) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, "vocab_size": ROWS, **more}


GPT2 = config("GPT2LMHeadModel", "gpt2", tie_word_embeddings=True, n_ctx=1024)
LLAMA = config("LlamaForCausalLM", "llama", tie_word_embeddings=False)
BERT = config("BertForMaskedLM", "bert", tie_word_embeddings=True)
T5 = config("T5ForConditionalGeneration", "t5", tie_word_embeddings=True, decoder_start_token_id=0)
BART = config("BartForConditionalGeneration", "bart", tie_word_embeddings=True)
LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "text_config": {"vocab_size": ROWS, "hidden_size": WIDTH},
}
UNKNOWN = config("HomemadeForCausalLM", "homemade")


def table(rows: int = ROWS, columns: int = WIDTH, seed: int = 0) -> npt.NDArray[np.float32]:
    """Rows that are all different, none of them special."""
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


OWN = table(seed=1)
"""A head that is not the embedding."""


def bf16(values: npt.NDArray[np.float32]) -> Bits:
    """The upper halves of float32s, cut off."""
    return Bits("BF16", (values.view(np.uint32) >> 16).astype(np.uint16))


def write(
    directory: Path,
    tensors: Tensors,
    config: object = None,
    *,
    metadata: Mapping[str, str] | None = None,
    name: str = "model.safetensors",
    files: Mapping[str, object] | None = None,
) -> Path:
    """A checkpoint: tensors, a config unless it is `None`, and other JSON files by their stem."""
    directory.mkdir(parents=True, exist_ok=True)
    save_safetensors(directory / name, tensors, metadata)
    for stem, content in {"config": config, **(files or {})}.items():
        if content is not None:
            (directory / f"{stem}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def tied_gpt2(directory: Path, **config: object) -> Path:
    """A checkpoint with nothing to find."""
    return write(directory, {WTE: table()}, {**GPT2, **config})


def shards(
    directory: Path,
    files: Mapping[str, Tensors],
    weight_map: Mapping[str, object] | None = None,
    total_size: object = None,
    config: object = None,
) -> Path:
    """A checkpoint in shards; without a `weight_map` the index says what is true."""
    for name, tensors in files.items():
        write(directory, tensors, name=name)
    if weight_map is None:
        weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    index: dict[str, object] = {"weight_map": weight_map}
    if total_size is not None:
        index["metadata"] = {"total_size": total_size}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config or GPT2))
    return directory


def findings(path: Path, **options: Any) -> list[Finding]:
    return list(audit(path, **options).findings)


def codes(path: Path, **options: Any) -> list[str]:
    """The codes found, each once, in order."""
    return sorted({finding.code for finding in findings(path, **options)})


def one(path: Path, code: str, **options: Any) -> Finding:
    """The only finding with this code."""
    found = [finding for finding in findings(path, **options) if finding.code == code]
    assert len(found) == 1, f"expected one {code}, found {[finding.code for finding in found]}"
    return found[0]


def snapshot(directory: Path) -> dict[str, tuple[str, bytes]]:
    """Everything in a directory: what each name is, and its bytes."""
    seen = {}
    for path in sorted(directory.rglob("*")):
        kind = "link" if path.is_symlink() else "file" if path.is_file() else "other"
        content = str(path.readlink()).encode() if kind == "link" else path.read_bytes() if kind == "file" else b""
        seen[str(path.relative_to(directory))] = (kind, content)
    return seen
