"""The cost of `bowline audit --html` beside the audit alone, and of finding neighbours beside torch.

1. The neighbours of 4,096 rows among all of a table of 49,152 x 576: `closest_rows` beside torch's products and `topk`
   in blocks of the same size.
2. The audit with a page and without one, for a vocabulary of 30,522 x 384, of 49,152 x 576 and of 262,144 x 640.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.measure import interleaved, machine, median
from bowline.geometry import closest_rows

__all__ = ["run"]

ROUNDS = 3
SHAPES = ((30_522, 384), (49_152, 576), (262_144, 640))
QUERIES, COUNT = 4096, 8
BLOCK = 2048


def run() -> str:
    """The measurements, as Markdown."""
    lines = ["# bowline audit --html", "", machine(["bowline-ties", "numpy", "torch"]), "", *_neighbours()]
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_DIRECTORY")) as workspace:
        lines += _pages(Path(workspace))
    return "\n".join(lines)


def _neighbours() -> list[str]:
    import torch

    rows, columns = SHAPES[1]
    table = np.random.default_rng(0).standard_normal((rows, columns), np.float32)
    queries = np.arange(QUERIES)

    def with_torch() -> np.ndarray:
        every = torch.from_numpy(table)
        units = every / every.norm(dim=1, keepdim=True)
        asked, best, ids = units[:QUERIES], torch.empty(QUERIES, 0), torch.empty(QUERIES, 0, dtype=torch.int64)
        for start in range(0, rows, BLOCK):
            scores = asked @ units[start : start + BLOCK].T
            here = torch.arange(start, min(start + BLOCK, rows))
            if start < QUERIES:
                scores[here, here - start] = -4.0
            values, places = scores.topk(COUNT, dim=1)
            best = torch.cat([best, values], dim=1)
            ids = torch.cat([ids, places + start], dim=1)
        order = best.topk(COUNT, dim=1).indices
        return ids.gather(1, order).numpy()

    def with_bowline() -> np.ndarray:
        return closest_rows(table, queries, count=COUNT)[0]

    seconds: dict[str, list[float]] = {"torch": [], "bowline": []}
    found: dict[str, np.ndarray] = {}
    calls: dict[str, Callable[[], np.ndarray]] = {"torch": with_torch, "bowline": with_bowline}
    for _ in range(ROUNDS + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            found[name] = call()
            seconds[name].append(time.perf_counter() - began)
    times = {name: median(all_of[1:]) for name, all_of in seconds.items()}
    alike = float((found["torch"] == found["bowline"]).mean())
    return [
        f"## The {COUNT} nearest of {rows:,} rows of {columns}, for {QUERIES:,} rows",
        "",
        f"`closest_rows` {times['bowline']:.2f} s, torch {times['torch']:.2f} s: "
        f"{times['bowline'] / times['torch']:.2f} times as long; {100 * alike:.3f} % of the rows are the same.",
        "",
    ]


def _pages(workspace: Path) -> list[str]:
    rows = []
    for shape in SHAPES:
        place = _write(workspace / f"{shape[0]}", *shape)
        page = workspace / f"{shape[0]}.html"
        audit = [sys.executable, "-m", "bowline", "audit", str(place), "--output-format", "json"]
        runs = interleaved({"audit": audit, "page": [*audit, "--html", str(page)]}, ROUNDS)
        assert {one.exit_code for all_of in runs.values() for one in all_of} <= {0, 1}
        times = {name: median([one.seconds for one in all_of]) for name, all_of in runs.items()}
        memory = {name: max(one.peak_anonymous_mb for one in all_of) for name, all_of in runs.items()}
        rows.append(
            f"| {shape[0]:,} x {shape[1]} | {times['audit']:.1f} s | {times['page']:.1f} s | "
            f"{times['page'] / times['audit']:.1f} | {memory['audit']:.0f} MB | {memory['page']:.0f} MB | "
            f"{page.stat().st_size / 1e6:.2f} MB |"
        )
    return [
        "## The audit, and the audit with a page",
        "",
        "A tied model in bfloat16, from the page cache; tokens of up to 13 letters. Memory is anonymous, at its peak.",
        "",
        "| vocabulary | audit | with the page | ratio | memory | with the page | the page |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]


def _write(directory: Path, rows: int, columns: int) -> Path:
    """A GPT-2 of one matrix, whose rows have norms and a common direction as trained ones do."""
    directory.mkdir()
    random = np.random.default_rng(rows)
    name, nbytes = "transformer.wte.weight", 2 * rows * columns
    header = json.dumps({name: {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, nbytes]}}).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for start in range(0, rows, 8192):
            block = random.standard_normal((min(8192, rows - start), columns), np.float32)
            block *= random.uniform(0.7, 1.4, (len(block), 1)).astype(np.float32)
            block[:, :4] += 0.5
            file.write((block.view(np.uint32) >> 16).astype("<u2").tobytes())
    letters = [chr(code) for code in (*range(97, 123), *range(0x430, 0x450))]
    lengths = random.integers(3, 9, rows)
    words = random.choice(letters, (rows, 8))
    vocabulary = {f"{''.join(words[row, : lengths[row]])}{row:x}": row for row in range(rows)}
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocabulary}}))
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": rows,
        "n_embd": columns,
        "eos_token_id": 0,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory
