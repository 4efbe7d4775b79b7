"""What an audit costs: headers alone, the vocabulary's values, and beside a load with transformers.

1. 64 shards, 40 GB of tensors, all but embedding and head holes in the file: headers against `python -c pass`.
2. The same with values: bytes a second against the same bytes read in sequence, and peak anonymous memory.
3. A model of 1.5 GB as transformers saves it: `bowline audit` against `from_pretrained` and a comparison of the ends.
4. A GGUF file of 5 GB with 262,144 tokens and as many merges, by its header: against `python -c pass`.
5. 500 tiny checkpoints in one call, with values.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from benchmarks.measure import interleaved, machine, median

__all__ = ["run"]

SHARDS = 64
LAYERS_BYTES = 36_000_000_000
ROWS, HIDDEN = 128_256, 8192
ROUNDS = 5
COLD_ROUNDS = 5

LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
a, b = model.get_input_embeddings().weight, model.get_output_embeddings().weight
print(a is b, torch.equal(a, b))
"""


def run() -> str:
    """The measurements, as Markdown."""
    lines = ["# bowline audit", "", machine(["bowline-ties", "numpy", "torch", "transformers", "safetensors"]), ""]
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_DIRECTORY")) as workspace:
        lines += _large(Path(workspace))
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_DIRECTORY")) as workspace:
        lines += _beside_transformers(Path(workspace))
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_DIRECTORY")) as workspace:
        lines += _gguf(Path(workspace) / "model.gguf")
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_DIRECTORY")) as workspace:
        lines += _many(Path(workspace))
    return "\n".join(lines)


def _large(workspace: Path) -> list[str]:
    total, vocabulary = _write_sharded(workspace)
    audit = [sys.executable, "-m", "bowline", "audit", str(workspace), "--output-format", "json"]
    headers = interleaved({"pass": [sys.executable, "-c", "pass"], "headers": [*audit, "--headers-only"]}, 2 * ROUNDS)
    nothing, header = (median([one.seconds for one in headers[name]]) for name in ("pass", "headers"))
    rows, memory = [], []
    for state, rounds, prepare in (("from the disk", COLD_ROUNDS, _forget), ("from the page cache", ROUNDS, _read)):
        reads, audits = [], []
        for _ in range(rounds):
            prepare(workspace)
            reads.append(_read(workspace))
            prepare(workspace)
            one = interleaved({"values": audit}, 1)["values"][0]
            audits.append(one.seconds)
            memory.append(one.peak_anonymous_mb)
        read_rate, audit_rate = vocabulary / median(reads), vocabulary / (median(audits) - header)
        rows.append(
            f"| with values, {state} | {median(audits):.2f} s | {audit_rate / 1e9:.2f} GB/s of vocabulary; the same "
            f"bytes read in sequence (one thread, 1 MiB) {read_rate / 1e9:.2f} GB/s: {audit_rate / read_rate:.2f} |"
        )
    return [
        f"## {SHARDS} shards, {total / 1e9:.1f} GB, of which {vocabulary / 1e9:.2f} GB of vocabulary",
        "",
        "| measurement | median | compared with |",
        "|---|---|---|",
        f"| headers only | {header:.3f} s | `python -c pass` {nothing:.3f} s: {header - nothing:+.3f} s |",
        *rows,
        f"| peak anonymous memory, with values | {max(memory):.0f} MB | |",
        "",
        f"Interleaved: {2 * ROUNDS} rounds for headers, {COLD_ROUNDS} from the disk, {ROUNDS} from the page cache.",
        "",
    ]


def _write_sharded(workspace: Path) -> tuple[int, int]:
    """A Llama-like untied model: real bf16 tables that differ in no row, everything else holes in the file."""
    layers = {
        f"model.layers.{at}.mlp.{part}_proj.weight": [28672, HIDDEN]
        for at in range(26)
        for part in ("gate", "up", "down")
    }
    tables = {"model.embed_tokens.weight": [ROWS, HIDDEN], "lm_head.weight": [ROWS, HIDDEN]}
    shapes = {**layers, **tables}
    names = list(shapes)
    homes = {
        name: f"model-{1 + at * SHARDS // len(names):05d}-of-{SHARDS:05d}.safetensors" for at, name in enumerate(names)
    }
    total = 0
    for shard in sorted(set(homes.values())):
        header: dict[str, Any] = {}
        at = 0
        for name in (name for name in names if homes[name] == shard):
            size = 2 * int(np.prod(shapes[name]))
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [at, at + size]}
            at += size
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        with (workspace / shard).open("wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            file.truncate(8 + len(encoded) + at)
            for name in tables:
                if homes[name] == shard:
                    _fill(file, 8 + len(encoded) + header[name]["data_offsets"][0])
        total += at
    index = {"metadata": {"total_size": total}, "weight_map": homes}
    (workspace / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": ROWS,
        "hidden_size": HIDDEN,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    }
    (workspace / "config.json").write_text(json.dumps(config))
    return total, sum(2 * rows * columns for rows, columns in tables.values())


def _fill(file: BinaryIO, offset: int) -> None:
    generator = np.random.default_rng(0)
    file.seek(offset)
    for start in range(0, ROWS, 1024):
        rows = generator.standard_normal((min(1024, ROWS - start), HIDDEN), np.float32) * np.float32(0.02)
        file.write((rows.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def _forget(workspace: Path) -> None:
    """Have the system drop what it holds of these files."""
    for path in workspace.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(workspace: Path) -> float:
    """Seconds to read the vocabulary's bytes in sequence, one thread, into one buffer."""
    buffer = bytearray(1 << 20)
    seconds = 0.0
    for path in sorted(workspace.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            for name, entry in header.items():
                if name in ("model.embed_tokens.weight", "lm_head.weight"):
                    begin, end = entry["data_offsets"]
                    started = time.perf_counter()
                    for at in range(8 + length + begin, 8 + length + end, len(buffer)):
                        os.preadv(file.fileno(), [buffer], at)
                    seconds += time.perf_counter() - started
    return seconds


def _beside_transformers(workspace: Path) -> list[str]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=24, n_embd=1024, n_head=16, tie_word_embeddings=False)
    GPT2LMHeadModel(config).save_pretrained(workspace)
    size = sum(path.stat().st_size for path in workspace.glob("*.safetensors"))
    results = interleaved(
        {
            "audit": [sys.executable, "-m", "bowline", "audit", str(workspace)],
            "transformers": [sys.executable, "-c", LOAD, str(workspace)],
        },
        3,
    )
    audit, load = (median([one.seconds for one in results[name]]) for name in ("audit", "transformers"))
    audit_mb, load_mb = (median([one.peak_anonymous_mb for one in results[name]]) for name in ("audit", "transformers"))
    return [
        f"## A model of {size / 1e9:.2f} GB (GPT-2 medium, untied)",
        "",
        "| method | time | peak anonymous memory |",
        "|---|---|---|",
        f"| `bowline audit` | {audit:.2f} s | {audit_mb:.0f} MB |",
        f"| transformers `from_pretrained`, then compare | {load:.2f} s | {load_mb:.0f} MB |",
        f"| ratio | {load / audit:.1f} | {load_mb / audit_mb:.1f} |",
        "",
        "3 rounds, interleaved. The audit also checks rows, geometry and loaders; the load only equality.",
    ]


TOKENS = 262_144
GGUF_BYTES = 5_000_000_000
TINY = 500


def _gguf(path: Path) -> list[str]:
    size = _write_gguf(path)
    command = [sys.executable, "-m", "bowline", "audit", "--headers-only", str(path)]
    results = interleaved({"pass": [sys.executable, "-c", "pass"], "headers": command}, 2 * ROUNDS)
    nothing, header = (median([one.seconds for one in results[name]]) for name in ("pass", "headers"))
    peak = max(one.peak_anonymous_mb for one in results["headers"])
    return [
        "",
        f"## A GGUF file of {path.stat().st_size / 1e9:.1f} GB, {TOKENS:,} tokens, a header of {size / 1e6:.1f} MB",
        "",
        f"`--headers-only`: {header:.3f} s; `python -c pass` {nothing:.3f} s: {header - nothing:+.3f} s. Peak "
        f"anonymous memory {peak:.0f} MB. {2 * ROUNDS} rounds, interleaved.",
        "",
    ]


def _write_gguf(path: Path) -> int:
    """Write a tied Gemma-like file, its tensors holes in it; returns the size of the header."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def texts(key: str, values: list[str]) -> bytes:
        return text(key) + struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(text, values))

    tokens = [f"token{at}" for at in range(TOKENS)]
    keys = [
        text("general.architecture") + struct.pack("<I", 8) + text("gemma3"),
        text("gemma3.embedding_length") + struct.pack("<II", 4, 2048),
        texts("tokenizer.ggml.tokens", tokens),
        texts("tokenizer.ggml.merges", [f"{one} {one}" for one in tokens]),
    ]
    layers = -(-(GGUF_BYTES - 2 * TOKENS * 2048) // (2 * 8192 * 2048))
    shapes = {"token_embd.weight": (TOKENS, 2048)}
    shapes |= {f"blk.{at}.ffn_up.weight": (8192, 2048) for at in range(layers)}
    entries, at = b"", 0
    for name, (rows, width) in shapes.items():
        entries += text(name) + struct.pack("<IQQIQ", 2, width, rows, 1, at)  # F16
        at += 2 * rows * width
    header = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(keys)) + b"".join(keys) + entries
    header += b"\0" * (-len(header) % 32)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + at)
    return len(header)


def _many(workspace: Path) -> list[str]:
    """One call for many checkpoints of 1,000 tokens and a width of 64."""
    from safetensors.numpy import save_file

    generator = np.random.default_rng(0)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 64}
    paths = [workspace / str(at) for at in range(TINY)]
    for path in paths:
        path.mkdir()
        table = generator.standard_normal((1000, 64), np.float32) * np.float32(0.02)
        save_file({"model.embed_tokens.weight": table}, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    audit = [sys.executable, "-m", "bowline", "audit", "--output-format", "json"]
    results = interleaved({"one": [*audit, str(paths[0])], "all": [*audit, *map(str, paths)]}, ROUNDS)
    one, every = (median([run.seconds for run in results[name]]) for name in ("one", "all"))
    return [
        f"## {TINY} tiny checkpoints in one call",
        "",
        f"{every:.2f} s, one alone {one:.2f} s: {1000 * (every - one) / (TINY - 1):.1f} ms each. {ROUNDS} rounds, "
        "interleaved.",
    ]
