"""Lookup and head of a decoding step on the CPU: `quantize_tied` in int8 and int4, float ends, torchao's int8 head."""

from __future__ import annotations

import copy
import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, Literal, cast

import torch
from torch import nn

from benchmarks.measure import machine, median
from bowline.nn import quantize_tied
from bowline.nn.modules.quantized_ends import QuantizedHead
from bowline.nn.tree.table_slots import SharedTable

__all__ = ["run"]

TORCHAO = Path(__file__).parents[1] / ".peers" / "torchao"
SHAPES = {"SmolLM2-135M": (49_152, 576), "Gemma 3 270M": (262_144, 640)}
THREADS = (1, 2)
ROUNDS = {49_152: 12, 262_144: 4}
LOOKUPS = 200
CODES: tuple[Literal["int8", "int4"], ...] = ("int8", "int4")
REFERENCE, SAME = "float32 head", "bfloat16 head"
LINE = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A head, the hidden state that it takes, and the bytes of the matrix that it reads.

    `lookup` is the embedding of the same table; torchao's head has none, because it is quantised alone.
    """

    head: Callable[[torch.Tensor], torch.Tensor]
    lookup: Callable[[torch.Tensor], torch.Tensor] | None = None
    hidden: torch.Tensor
    megabytes: float
    largest_error: float
    """That of its logits against float64 with the matrix that it stands for, divided by the largest logit."""


@torch.no_grad()
def run() -> str:
    """Each head's median, by shape and number of threads, as Markdown."""
    before = torch.get_num_threads()
    sections = []
    try:
        for name, (rows, width) in SHAPES.items():
            cases = _cases(rows, width)
            for threads in THREADS:
                torch.set_num_threads(threads)
                seconds = _interleaved(cases, ROUNDS[rows])
                sections.append(
                    _section(f"{name}, {rows:,} x {width}, {threads} thread{'s' * (threads > 1)}", cases, seconds)
                )
    finally:
        torch.set_num_threads(before)
    rounds = " and ".join(f"{ROUNDS[rows]} of the {rows:,}-row heads" for rows, _ in SHAPES.values())
    return "\n".join(
        [
            "# Lookup and head of a decoding step on the CPU",
            "",
            fill(
                "One hidden state (1, D) to logits (1, V). The matrix is random, N(0, 0.02^2). Interleaved rounds, "
                f"{rounds}. Other work ran on the machine (see the load): compare the heads of one table by their "
                "ratios, and not the milliseconds of two tables. torchao converts its codes to float at each call; its "
                "time varied by up to four times between runs. The largest error is that of a logit against float64 "
                "with the same matrix, divided by the largest logit. The lookup is that of one id, the median of "
                f"{LOOKUPS}. torchao's head is quantised alone: the float embedding stays beside it.",
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
        cases[f"{name} head"] = Case(
            head=model["head"],
            lookup=model["wte"],
            hidden=state,
            megabytes=size,
            largest_error=_largest_error(model["head"], state, matrix.to(dtype)),
        )
        quantised = _torchao(matrix.to(dtype))
        if quantised is not None:
            cases[f"torchao int8 weight-only, {name}"] = Case(
                head=quantised,
                hidden=state,
                megabytes=rows * width / 1e6,
                largest_error=_largest_error(quantised, state, quantised.weight.dequantize()),
            )
        for codes in CODES:
            ends = _tied(matrix.to(dtype))
            quantize_tied(ends, dtype=codes)
            table = cast(QuantizedHead, ends["head"]).table
            cases[f"`quantize_tied` {codes}, {name}"] = Case(
                head=ends["head"],
                lookup=ends["wte"],
                hidden=state,
                megabytes=sum(part.nbytes for part in table.buffers()) / 1e6,
                largest_error=_largest_error(ends["head"], state, _stood_for(table)),
            )
    return cases


def _stood_for(table: SharedTable) -> torch.Tensor:
    """The matrix that a table's codes stand for, in float32, rounded once."""
    wide = copy.deepcopy(table)
    wide.scale = wide.scale.float()
    return wide.rows()


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


def _largest_error(head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, matrix: torch.Tensor) -> float:
    """Computed block by block: a float64 copy of each case's matrix would not fit in memory."""
    exact = torch.cat([nn.functional.linear(hidden.double(), rows.double()) for rows in matrix.split(8192)], dim=-1)
    return float((head(hidden).double() - exact).abs().max() / exact.abs().max())


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


def _lookup_seconds(case: Case) -> float | None:
    """The median of looking one id up."""
    if case.lookup is None:
        return None
    seconds = []
    for at in range(LOOKUPS + 1):
        ids = torch.tensor([[7 * at]])
        started = time.perf_counter()
        case.lookup(ids)
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])


def _section(title: str, cases: dict[str, Case], seconds: dict[str, list[float]]) -> str:
    reference = median(seconds[REFERENCE])
    lines = [
        "",
        f"## {title}",
        "",
        f"| head | matrix, MB | head: median ms | fastest ms | of the {REFERENCE} | of the {SAME} | largest error | "
        f"lookup: median us | of {SAME.removesuffix(' head')}'s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lookups = {name: _lookup_seconds(case) for name, case in cases.items()}
    narrow, one_row = median(seconds[SAME]), lookups[SAME]
    for name, case in cases.items():
        middle, fastest, lookup = median(seconds[name]), min(seconds[name]), lookups[name]
        found = "- | - |" if lookup is None or one_row is None else f"{1e6 * lookup:.1f} | {lookup / one_row:.1f} |"
        lines.append(
            f"| {name} | {case.megabytes:.0f} | {1e3 * middle:.2f} | {1e3 * fastest:.2f} | {middle / reference:.2f} | "
            f"{middle / narrow:.2f} | {case.largest_error:.1e} | {found}"
        )
    return "\n".join(lines)
