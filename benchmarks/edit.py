"""Edits of a checkpoint on disk, beside `cp`, safetensors and transformers, in one run.

A GPT-2 of 1.8 GB in one file, and a Llama of 8 GB in eight shards, both of random bytes in float32. Each task is a
command of its own, start-up included; everything that it wrote is synchronised to disk before its time ends. The
sources are in the page cache. Anonymous memory is polled from outside.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from benchmarks.measure import Measured, machine, measure, median
from bowline.checkpoint.formats.safetensors_writer import Payload, write_payloads

__all__ = ["run"]

ROUNDS = 5
SHARDED_ROUNDS = 3
BLOCK = 1 << 22
VOCABULARY, LARGER = 50257, 50304
WIDTH, LAYERS = 1024, 32
LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}
LLAMA_LAYERS = 28
SHARDS = 8

Shapes = Mapping[str, tuple[int, ...]]

PLAIN = """
import json, os, sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
source, out = map(Path, sys.argv[1:3])
out.mkdir()
for file in sorted(source.glob("*.safetensors")):
    tensors = load_file(file)
    for name in ("transformer.wte.weight", "model.embed_tokens.weight"):
        if name in tensors:
            old = tensors[name]
            new = old.mean(0, keepdim=True).expand({larger} - len(old), -1)
            tensors[name] = torch.cat([old, new])
    save_file(tensors, out / file.name, {{"format": "pt"}})
for file in source.glob("*.json"):
    (out / file.name).write_bytes(file.read_bytes())
os.sync()
"""
MODEL = """
import os, sys, torch, transformers
transformers.logging.set_verbosity_error()
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
model.resize_token_embeddings({larger}, mean_resizing={mean})
model.save_pretrained(sys.argv[2], max_shard_size="2GB")
os.sync()
"""


def run() -> str:
    """Run all tasks; returns Markdown."""
    lines = [
        "# Edits of a checkpoint on disk",
        "",
        machine(["bowline-ties", "safetensors", "torch", "transformers"]),
        "",
        f"Medians of {ROUNDS} interleaved rounds, of {SHARDED_ROUNDS} for the shards; the sources are in the page "
        "cache, what was written is synchronised.",
        "",
    ]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
        root = Path(place)
        for title, make, rounds in (("One file", single, ROUNDS), ("Eight shards", sharded, SHARDED_ROUNDS)):
            source = root / "source"
            nbytes = make(source)
            lines += [
                f"## {title}: {nbytes / 1e9:.2f} GB, {VOCABULARY} -> {LARGER} rows",
                "",
                *table(source, root, rounds),
            ]
            shutil.rmtree(source)
    return "\n".join(lines)


def table(source: Path, root: Path, rounds: int) -> list[str]:
    """The tasks on one checkpoint, as Markdown."""
    found = timed(source, root, rounds)
    cp = median([one.seconds for one in found["cp"]])
    lines = ["| task | seconds | beside cp | anonymous MB |", "|---|---|---|---|"]
    for task, runs in found.items():
        seconds, peak = median([one.seconds for one in runs]), max(one.peak_anonymous_mb for one in runs)
        failed = "" if all(one.exit_code == 0 for one in runs) else " (FAILED)"
        lines.append(f"| {task}{failed} | {seconds:.2f} | {seconds / cp:.2f} | {peak:.0f} |")
    return [*lines, ""]


def timed(source: Path, root: Path, rounds: int) -> dict[str, list[Measured]]:
    """Every task once a round; what it wrote is removed before the next."""
    out, copy = root / "out", root / "in-place"
    bowline = [sys.executable, "-m", "bowline"]
    larger = ["--to", str(LARGER)]
    python = [sys.executable, "-W", "ignore", "-c"]
    tasks: dict[str, tuple[Callable[[], object], list[str]]] = {
        "cp": (_nothing, ["sh", "-c", f"cp -r {source} {out} && sync {out}/*"]),
        "bowline resize, new directory": (_nothing, [*bowline, "resize", str(source), str(out), *larger]),
        "bowline untie, new directory": (_nothing, [*bowline, "untie", str(source), str(out)]),
        "bowline cast --dtype bf16, new directory": (
            _nothing,
            [*bowline, "cast", str(source), str(out), "--dtype", "bf16"],
        ),
        "bowline resize --in-place": (
            lambda: shutil.copytree(source, copy),
            [*bowline, "resize", str(copy), *larger, "--in-place"],
        ),
        "safetensors: load, resize, save": (_nothing, [*python, PLAIN.format(larger=LARGER), str(source), str(out)]),
        "transformers: load, resize (mean off), save": (
            _nothing,
            [*python, MODEL.format(larger=LARGER, mean=False), str(source), str(out)],
        ),
        "transformers: load, resize, save": (
            _nothing,
            [*python, MODEL.format(larger=LARGER, mean=True), str(source), str(out)],
        ),
    }
    found: dict[str, list[Measured]] = {task: [] for task in tasks}
    for _ in range(rounds):
        for task, (prepare, command) in tasks.items():
            prepare()
            os.sync()  # what was prepared is not written to disk on the task's time
            warm(source)
            found[task].append(measure(command))
            for made in (out, copy):
                shutil.rmtree(made, ignore_errors=True)
    return found


def _nothing() -> None:
    """No preparation."""


def warm(directory: Path) -> None:
    """Read every file once."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            while file.read(BLOCK):
                pass


def single(place: Path, layers: int = LAYERS) -> int:
    """A tied GPT-2 in one file."""
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (VOCABULARY, WIDTH),
        "transformer.wpe.weight": (1024, WIDTH),
        "transformer.ln_f.weight": (WIDTH,),
        "transformer.ln_f.bias": (WIDTH,),
    }
    for layer in range(layers):
        stem = f"transformer.h.{layer}."
        for name, columns, rows in (
            ("attn.c_attn", 3 * WIDTH, WIDTH),
            ("attn.c_proj", WIDTH, WIDTH),
            ("mlp.c_fc", 4 * WIDTH, WIDTH),
            ("mlp.c_proj", WIDTH, 4 * WIDTH),
        ):
            shapes |= {f"{stem}{name}.weight": (rows, columns), f"{stem}{name}.bias": (columns,)}
        shapes |= {f"{stem}{norm}.{part}": (WIDTH,) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")}
    place.mkdir()
    sizes = {"n_embd": WIDTH, "n_layer": layers, "n_head": 16}
    _config(place, "GPT2LMHeadModel", "gpt2", sizes)
    return _write(place / "model.safetensors", shapes)


def sharded(place: Path, layers: int = LLAMA_LAYERS) -> int:
    """A tied Llama in eight shards, the table in the first."""
    sizes = LLAMA | {"num_hidden_layers": layers}
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, width),
        "model.norm.weight": (width,),
    }
    homes = dict.fromkeys(shapes, 0)
    for layer in range(sizes["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        mine: dict[str, tuple[int, ...]] = {
            f"{stem}self_attn.{name}_proj.weight": (width, width) for name in ("q", "k", "v", "o")
        }
        mine |= {f"{stem}mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        mine |= {f"{stem}mlp.down_proj.weight": (width, inner)}
        mine |= {f"{stem}{norm}.weight": (width,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= mine
        homes |= dict.fromkeys(mine, 1 + layer * (SHARDS - 1) // sizes["num_hidden_layers"])
    place.mkdir()
    files = [f"model-{at:05d}-of-{SHARDS:05d}.safetensors" for at in range(1, SHARDS + 1)]
    total = sum(
        _write(place / file, {name: shape for name, shape in shapes.items() if homes[name] == at})
        for at, file in enumerate(files)
    )
    index = {"metadata": {"total_size": total}, "weight_map": {name: files[home] for name, home in homes.items()}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    _config(place, "LlamaForCausalLM", "llama", sizes | {"num_key_value_heads": sizes["num_attention_heads"]})
    return total


def _config(place: Path, architecture: str, model_type: str, sizes: Mapping[str, int]) -> None:
    content = {"architectures": [architecture], "model_type": model_type, "vocab_size": VOCABULARY}
    (place / "config.json").write_text(json.dumps({**content, "tie_word_embeddings": True, **sizes}))


def _write(path: Path, shapes: Shapes) -> int:
    """Write tensors of random numbers, the same block of them over and over; returns their bytes."""
    block = memoryview((np.random.default_rng(0).standard_normal(BLOCK // 4, dtype=np.float32) * 0.02).tobytes())

    def payload(name: str, shape: tuple[int, ...]) -> Payload:
        nbytes = 4 * int(np.prod(shape))
        parts = (block[: min(BLOCK, nbytes - at)] for at in range(0, nbytes, BLOCK))
        return Payload(name=name, dtype="F32", shape=shape, data=lambda: parts)

    payloads = [payload(name, shape) for name, shape in shapes.items()]
    with path.open("wb") as file:
        write_payloads(file, payloads, {"format": "pt"})
    return sum(one.nbytes for one in payloads)
