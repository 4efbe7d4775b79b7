"""The head of one decoding step on the CPU: the int8 table of `quantize_tied` beside float heads and torchao's int8."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, cast

import torch
from torch import nn

from benchmarks.measure import machine, median
from bowline.nn import quantize_tied
from bowline.nn.modules.quantized_ends import QuantizedHead

__all__ = ["run"]

TORCHAO = Path(__file__).parents[1] / ".peers" / "torchao"
SHAPES = {"SmolLM2-135M": (49_152, 576), "Gemma 3 270M": (262_144, 640)}
THREADS = (1, 2)
ROUNDS = {49_152: 60, 262_144: 24}
REFERENCE = "float32 head"
LINE = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A head, the hidden state that it takes, and the bytes of the matrix that it reads."""

    head: Callable[[torch.Tensor], torch.Tensor]
    hidden: torch.Tensor
    megabytes: float
    stored: torch.Tensor
    """The matrix that it stands for, by which its logits are judged."""


@torch.no_grad()
def run() -> str:
    """Each head's median, by shape and number of threads, as Markdown."""
    before = torch.get_num_threads()
    sections = []
    try:
        for name, (rows, width) in SHAPES.items():
            cases = _cases(rows, width)
            off = {what: _largest_error(case) for what, case in cases.items()}
            for threads in THREADS:
                torch.set_num_threads(threads)
                seconds = _interleaved(cases, ROUNDS[rows])
                sections.append(
                    _section(f"{name}, {rows:,} x {width}, {threads} thread{'s' * (threads > 1)}", cases, seconds, off)
                )
    finally:
        torch.set_num_threads(before)
    rounds = " and ".join(f"{ROUNDS[rows]} of the {rows:,}-row heads" for rows, _ in SHAPES.values())
    return "\n".join(
        [
            "# The head of a decoding step on the CPU",
            "",
            fill(
                "One hidden state (1, D) to logits (1, V). The matrix is random, N(0, 0.02^2). Interleaved rounds, "
                f"{rounds}. Other work ran on the machine (see the load): compare the heads of one table by their "
                "ratios, and not the milliseconds of two tables. torchao converts its codes to float at each call; its "
                "time varied by up to four times between runs. The largest error is that of a logit against float64 "
                "with the same matrix, divided by the largest logit.",
                LINE,
            ),
            "",
            machine(["bowline-ties", "torch", "torchao"]),
            *sections,
        ]
    )


def _cases(rows: int, width: int) -> dict[str, Case]:
    torch.manual_seed(0)
    matrix = torch.randn(rows, width) * 0.02
    hidden = torch.randn(1, width)
    cases: dict[str, Case] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        size = rows * width * dtype.itemsize / 1e6
        model = _tied(matrix.to(dtype))
        state = hidden.to(dtype)
        cases[f"{name} head"] = Case(head=model["head"], hidden=state, megabytes=size, stored=matrix.to(dtype).double())
        quantised = _torchao(matrix.to(dtype))
        if quantised is not None:
            cases[f"torchao int8 weight-only, {name}"] = Case(
                head=quantised,
                hidden=state,
                megabytes=rows * width / 1e6,
                stored=quantised.weight.dequantize().double(),
            )
        table = _tied(matrix.to(dtype))
        quantize_tied(table)
        codes = cast(QuantizedHead, table["head"]).table
        cases[f"`quantize_tied`, {name}"] = Case(
            head=table["head"],
            hidden=state,
            megabytes=rows * width / 1e6,
            stored=codes.values.double() * codes.scale.double()[:, None],
        )
    return cases


def _tied(matrix: torch.Tensor) -> nn.ModuleDict:
    rows, width = matrix.shape
    model = nn.ModuleDict({"wte": nn.Embedding(rows, width, _weight=matrix)})
    with torch.device("meta"):
        model["head"] = nn.Linear(width, rows, bias=False)
    model["head"].weight = model["wte"].weight
    return model


def _torchao(matrix: torch.Tensor) -> nn.Linear | None:
    """A head quantised by torchao, or `None` if it is not unpacked in .peers (see the Makefile)."""
    if not (TORCHAO / "torchao").is_dir():
        return None
    if str(TORCHAO) not in sys.path:
        sys.path.append(str(TORCHAO))
    torchao: Any = importlib.import_module("torchao.quantization")
    with torch.device("meta"):
        head = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
    head.weight = nn.Parameter(matrix.clone())
    torchao.quantize_(head, torchao.Int8WeightOnlyConfig())
    return head


def _largest_error(case: Case) -> float:
    exact = nn.functional.linear(case.hidden.double(), case.stored)
    return float((case.head(case.hidden).double() - exact).abs().max() / exact.abs().max())


def _interleaved(cases: dict[str, Case], rounds: int) -> dict[str, list[float]]:
    """Seconds of one call of each, round by round; the first call of each is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for case in cases.values():
        case.head(case.hidden)
    for _ in range(rounds):
        for name, case in cases.items():
            started = time.perf_counter()
            case.head(case.hidden)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def _section(title: str, cases: dict[str, Case], seconds: dict[str, list[float]], off: dict[str, float]) -> str:
    reference = median(seconds[REFERENCE])
    lines = [
        "",
        f"## {title}",
        "",
        f"| head | matrix, MB | median ms | fastest ms | of the {REFERENCE}'s median | largest error |",
        "|---|---|---|---|---|---|",
    ]
    for name, case in cases.items():
        middle, fastest = median(seconds[name]), min(seconds[name])
        lines.append(
            f"| {name} | {case.megabytes:.0f} | {1e3 * middle:.2f} | {1e3 * fastest:.2f} | {middle / reference:.2f} | "
            f"{off[name]:.1e} |"
        )
    return "\n".join(lines)
