"""A merge of a LoRA into its base on disk, beside `cp` and PEFT's load, merge and save, in one run.

The base is a tied Llama of 3 GB in bfloat16, in one file, the LoRA of rank 16 at every linear layer and at the head.
Each task is a command of its own, start-up included; everything that it wrote is synchronised to disk before its time
ends. The sources are in the page cache. Anonymous memory is polled from outside.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.edit import BLOCK, VOCABULARY, warm
from benchmarks.measure import Measured, machine, measure, median
from bowline.checkpoint.formats.dtypes import BITS
from bowline.checkpoint.formats.safetensors_writer import Payload, write_payloads

__all__ = ["run"]

ROUNDS = 5
RANK = 16
WIDTH, INNER, LAYERS, HEADS = 2048, 8192, 21, 16
EMBEDDING = "model.embed_tokens.weight"
PROJECTIONS = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (WIDTH, WIDTH),
    "self_attn.v_proj": (WIDTH, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}
PEFT = """
import os, sys, torch, transformers, warnings
from peft import PeftModel
warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
base = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
merged = PeftModel.from_pretrained(base, sys.argv[2]).merge_and_unload()
merged.save_pretrained(sys.argv[3])
os.sync()
"""

Shapes = Mapping[str, tuple[int, ...]]


def run() -> str:
    """Run all tasks; returns Markdown."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
        root = Path(place)
        nbytes = base(root / "base")
        adapted = adapter(root / "adapter", root / "base")
        found = timed(root)
    cp = median([one.seconds for one in found["cp"]])
    lines = [
        "# A merge on disk",
        "",
        machine(["bowline-ties", "peft", "transformers", "torch", "numpy"]),
        "",
        f"A base of {nbytes / 1e9:.2f} GB in bfloat16, a LoRA of rank {RANK} at {adapted} modules, the head of the tie "
        f"among them. Medians of {ROUNDS} interleaved rounds; the sources are in the page cache, what was written is "
        "synchronised.",
        "",
        "| task | seconds | beside cp | anonymous MB |",
        "|---|---|---|---|",
    ]
    for task, runs in found.items():
        seconds, peak = median([one.seconds for one in runs]), max(one.peak_anonymous_mb for one in runs)
        failed = "" if all(one.exit_code == 0 for one in runs) else " (FAILED)"
        lines.append(f"| {task}{failed} | {seconds:.2f} | {seconds / cp:.2f} | {peak:.0f} |")
    return "\n".join([*lines, ""])


def timed(root: Path) -> dict[str, list[Measured]]:
    """Every task once a round; what it wrote is removed before the next."""
    source, lora, out = root / "base", root / "adapter", root / "out"
    tasks = {
        "cp": ["sh", "-c", f"cp -r {source} {out} && sync {out}/*"],
        "bowline merge": [sys.executable, "-m", "bowline", "merge", str(source), str(lora), str(out)],
        "PEFT: load, merge, save": [sys.executable, "-W", "ignore", "-c", PEFT, str(source), str(lora), str(out)],
    }
    found: dict[str, list[Measured]] = {task: [] for task in tasks}
    for _ in range(ROUNDS):
        for task, command in tasks.items():
            warm(source)
            found[task].append(measure(command))
            shutil.rmtree(out, ignore_errors=True)
    return found


def base(place: Path) -> int:
    """The base model."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}."
        shapes |= {f"{stem}{name}.weight": shape for name, shape in PROJECTIONS.items()}
        shapes |= {f"{stem}{norm}.weight": (WIDTH,) for norm in ("input_layernorm", "post_attention_layernorm")}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    return _write(place / "model.safetensors", "BF16", shapes)


def adapter(place: Path, of: Path) -> int:
    """The LoRA; returns the number of adapted modules."""
    modules = {f"model.layers.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in PROJECTIONS.items()}
    modules["lm_head"] = (VOCABULARY, WIDTH)
    shapes: dict[str, tuple[int, ...]] = {}
    for module, (rows, columns) in modules.items():
        shapes[f"base_model.model.{module}.lora_A.weight"] = (RANK, columns)
        shapes[f"base_model.model.{module}.lora_B.weight"] = (rows, RANK)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(of),
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
    }
    place.mkdir()
    (place / "adapter_config.json").write_text(json.dumps(config))
    _write(place / "adapter_model.safetensors", "F32", shapes)
    return len(modules)


def _write(path: Path, dtype: str, shapes: Shapes) -> int:
    """Write tensors of random numbers, the same block of them over and over; returns their bytes."""
    numbers = np.random.default_rng(0).standard_normal(BLOCK // 4, dtype=np.float32) * 0.02
    raw = numbers.tobytes() if dtype == "F32" else (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    block = memoryview(raw)

    def payload(name: str, shape: tuple[int, ...]) -> Payload:
        nbytes = int(np.prod(shape)) * BITS[dtype] // 8
        parts = (block[: min(len(block), nbytes - at)] for at in range(0, nbytes, len(block)))
        return Payload(name=name, dtype=dtype, shape=shape, data=lambda: parts)

    payloads = [payload(name, shape) for name, shape in shapes.items()]
    with path.open("wb") as file:
        write_payloads(file, payloads, {"format": "pt"})
    return sum(one.nbytes for one in payloads)
