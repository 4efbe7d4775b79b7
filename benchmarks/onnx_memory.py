"""Resident memory of onnxruntime with a tied model, in tables: Bowline's export, torch's, and two initializers.

Each file is loaded and run once in a process of its own, whose resident memory after its imports is subtracted. The
model is a Llama of one narrow layer, so that the table of the vocabulary is nearly all of it.
"""

from __future__ import annotations

import copy
import json
import logging
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import bowline
from benchmarks.measure import machine, median
from bowline.export.plain_call import evaluating, example_inputs
from bowline.export.program import make_program, quietly

__all__ = ["run"]

ROWS, WIDTH = 49_152, 576
TABLE = 4 * ROWS * WIDTH
BLOCK = 32
"""Numbers of a row that share a scale, in MatMulNBits."""
TOKENS = (1, 2, 8, 64)
ROUNDS = 25
LINE = 120
CHILD = """
import json, sys
import numpy, onnxruntime

def resident():
    lines = open("/proc/self/status").read().splitlines()
    held = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith("Rss")}
    return held["RssAnon"], held["RssFile"]

options = onnxruntime.SessionOptions()
options.log_severity_level = 3
if sys.argv[2] == "unpacked":
    options.add_session_config_entry("session.disable_prepacking", "1")
given = {name: numpy.ones((1, 8), numpy.int64) for name in ("input_ids", "attention_mask")}
before = resident()
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
loaded = resident()
session.run(None, given)
print(json.dumps([[after - start for after, start in zip(one, before)] for one in (loaded, resident())]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A file, and how onnxruntime is asked to load it."""

    file: Path
    unpacked: bool = False

    @property
    def nbytes(self) -> int:
        """Those of the file and of its external data."""
        data = self.file.with_name(f"{self.file.name}.data")
        return self.file.stat().st_size + (data.stat().st_size if data.exists() else 0)

    def measured(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Anonymous and file-backed bytes after loading, and the same after one run."""
        command = [sys.executable, "-c", CHILD, str(self.file), "unpacked" if self.unpacked else "default"]
        loaded, ran = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        return tuple(loaded), tuple(ran)


def run() -> str:
    """Write every file, load each in a process, time two of them; returns Markdown."""
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
        root = Path(place)
        cases = _cases(root)
        lines = [
            "# Resident memory of onnxruntime with a tied model",
            "",
            machine(["bowline-ties", "onnxruntime", "onnx", "torch", "transformers"]),
            "",
            fill(
                f"A tied Llama of one layer, {ROWS:,} x {WIDTH} in float32: the table has {TABLE / 1e6:.1f} MB, all "
                "other weights 4% of it. Every figure but the counts is a multiple of the table's bytes. Each file is "
                "loaded in a process of its own with default options and run once on 8 tokens; what was resident after "
                "the imports is subtracted. Matrices: initializers that hold the vocabulary's matrix, in the file and "
                "in what onnxruntime's optimiser makes of it (ORT_ENABLE_ALL). File-backed pages are those of "
                "onnxruntime's own libraries (0.07) and of a data file, which count once they have been read: a "
                "look-up reads only its own rows, and torch's product reads a packed copy, so another row of the table "
                "becomes resident when it is first looked up. MatMulNBits: onnxruntime's quantiser of products, int4 "
                f"in blocks of {BLOCK}; torch's export has its constants folded first (ORT_ENABLE_BASIC), or the "
                "quantiser would not find its head either.",
                LINE,
            ),
            "",
            "| export | size on disk | matrices: file, optimised | anonymous: loaded | after a run | "
            "file-backed: loaded | after a run |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, case in cases.items():
            (anonymous, of_files), (anonymous_ran, of_files_ran) = case.measured()
            counts = f"{_matrices(case.file)}, {_matrices(_optimised(case.file, root))}"
            figures = (one / TABLE for one in (anonymous, anonymous_ran, of_files, of_files_ran))
            lines.append(
                f"| {name} | {case.nbytes / TABLE:.2f} | {counts} | {' | '.join(f'{one:.2f}' for one in figures)} |"
            )
        lines += ["", *_times(root / "bowline.onnx", root / "torch.onnx")]
    return "\n".join([*lines, ""])


def _cases(root: Path) -> dict[str, Case]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"intermediate_size": 64, "num_attention_heads": 9, "num_key_value_heads": 3}
    config = LlamaConfig(
        vocab_size=ROWS, hidden_size=WIDTH, num_hidden_layers=1, max_position_embeddings=128, **sizes,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    untied = copy.deepcopy(model)
    untied.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    bowline.export(model, root / "bowline.onnx", to="onnx")
    bowline.export(model, root / "bowline_data.onnx", to="onnx", external_data=True)
    bowline.export(untied, root / "untied.onnx", to="onnx")
    with evaluating(model), quietly():
        program = make_program(model, example_inputs(model, None))
        made: Any = torch.onnx.export(program, dynamo=True, verbose=False)
        made.save(str(root / "torch.onnx"))
        made.save(str(root / "torch_data.onnx"), external_data=True)
    folded = _optimised(root / "torch.onnx", root, level="ORT_ENABLE_BASIC")
    _quantised(root / "bowline.onnx", root / "bowline_int4.onnx", ("MatMul",))
    _quantised(folded, root / "head.onnx", ("MatMul",))
    _quantised(folded, root / "both.onnx", ("MatMul", "Gather"))
    return {
        "Bowline": Case(file=root / "bowline.onnx"),
        "torch.onnx.export(dynamo=True)": Case(file=root / "torch.onnx"),
        "the head a second initializer": Case(file=root / "untied.onnx"),
        "Bowline, external data": Case(file=root / "bowline_data.onnx"),
        "torch.onnx.export, external data": Case(file=root / "torch_data.onnx"),
        "Bowline, session.disable_prepacking": Case(file=root / "bowline.onnx", unpacked=True),
        "torch.onnx.export, session.disable_prepacking": Case(file=root / "torch.onnx", unpacked=True),
        "Bowline, MatMulNBits": Case(file=root / "bowline_int4.onnx"),
        "torch.onnx.export, MatMulNBits": Case(file=root / "head.onnx"),
        "torch.onnx.export, MatMulNBits and GatherBlockQuantized": Case(file=root / "both.onnx"),
    }


def _quantised(file: Path, out: Path, operators: tuple[str, ...]) -> None:
    """Write int4 codes for the matrices of these operators."""
    quantiser: Any = import_module("onnxruntime.quantization.matmul_nbits_quantizer").MatMulNBitsQuantizer(
        onnx.load(str(file)), block_size=BLOCK, is_symmetric=True, op_types_to_quantize=operators
    )
    quantiser.process()
    quantiser.model.save_model_to_file(str(out), False)


def _session(file: Path, optimised: Path | None = None, level: str = "ORT_ENABLE_ALL") -> Any:
    onnxruntime = import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    if optimised is not None:
        options.optimized_model_filepath = str(optimised)
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _optimised(file: Path, root: Path, level: str = "ORT_ENABLE_ALL") -> Path:
    made = root / f"{file.stem}_{level}.onnx"
    _session(file, made, level)
    return made


def _matrices(file: Path) -> int:
    """The initializers that hold the vocabulary's matrix, as numbers or as codes; scales are not counted."""
    graph = onnx.load(str(file), load_external_data=False).graph
    return sum(ROWS in one.dims and np.prod(one.dims) >= ROWS * WIDTH // 2 for one in graph.initializer)


def _times(ours: Path, packed: Path) -> list[str]:
    """Milliseconds of a call by tokens: the table read as it lies, and from the packed copy."""
    sessions = {"Bowline": _session(ours), "torch.onnx.export": _session(packed)}
    lines = [
        fill(
            "Milliseconds of a call, nearly all of it the head's product: medians of "
            f"{ROUNDS} interleaved rounds, the fastest in brackets. Torch's export multiplies by the packed copy.",
            LINE,
        ),
        "",
        "| tokens | Bowline | torch.onnx.export | ratio of medians | of fastest |",
        "|---|---|---|---|---|",
    ]
    for count in TOKENS:
        given = {"input_ids": np.arange(count)[None], "attention_mask": np.ones((1, count), np.int64)}
        found: dict[str, list[float]] = {name: [] for name in sessions}
        for _ in range(ROUNDS):
            for name, session in sessions.items():
                started = time.perf_counter()
                session.run(None, given)
                found[name].append(1e3 * (time.perf_counter() - started))
        (one, other), (fast, faster) = map(median, found.values()), map(min, found.values())
        both = f"{one:.1f} ({fast:.1f}) | {other:.1f} ({faster:.1f})"
        lines.append(f"| {count} | {both} | {one / other:.2f} | {fast / faster:.2f} |")
    return lines
