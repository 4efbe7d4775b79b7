"""What a guard of ties costs at every step: its check beside the one that a careful user would write."""

from __future__ import annotations

import timeit
from collections.abc import Callable

from torch import nn

from benchmarks.measure import machine, median
from bowline.nn import check_ties
from bowline.nn.guards.tie_guard import TieGuard

__all__ = ["run"]

ROUNDS = 25
VOCABULARY, WIDTH, LAYERS = 1024, 64, 42
TARGET, SOURCE = "lm_head.weight", "transformer.wte.weight"


class Block(nn.Module):
    """The seven modules of a layer, itself among them; nothing here is ever called."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)


class Model(nn.Module):
    """A tied language model of 300 modules."""

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(VOCABULARY, WIDTH), "h": blocks})
        self.transformer["ln_f"] = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]


def run() -> str:
    """Each check's median, as Markdown."""
    model, more = Model(), Model()
    more.transformer["copy_of_wte"] = more.transformer["wte"]
    checks: dict[str, tuple[Callable[[], object], int]] = {
        "`TieGuard.check()`, one tie": (TieGuard(model).check, 2000),
        "`TieGuard.check()`, two ties": (TieGuard(more).check, 2000),
        "both names in `named_parameters(remove_duplicate=False)`": (lambda: _by_names(model), 20),
        "`check_ties(model)`": (lambda: check_ties(model, {TARGET: SOURCE}), 5),
    }
    medians = _interleaved(checks)
    guard = next(iter(medians.values()))
    modules, parameters = sum(1 for _ in model.modules()), sum(1 for _ in model.parameters())
    return "\n".join(
        [
            "# One check of ties",
            "",
            machine(["bowline-ties", "torch"]),
            "",
            f"## A model of {modules} modules and {parameters} parameters",
            "",
            "| check | median | ratio to the guard with one tie |",
            "|---|---|---|",
            *(f"| {name} | {1e6 * seconds:.2f} µs | {seconds / guard:.1f} |" for name, seconds in medians.items()),
            "",
            f"{ROUNDS} rounds, interleaved; a round is the mean of 5 (`check_ties`), 20 (names) or 2000 calls.",
        ]
    )


def _by_names(model: nn.Module) -> bool:
    """The naive check: every parameter under every name, then two of them."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return named[TARGET] is named[SOURCE]


def _interleaved(checks: dict[str, tuple[Callable[[], object], int]]) -> dict[str, float]:
    """Seconds for one call of each, the median of the rounds."""
    rounds: dict[str, list[float]] = {name: [] for name in checks}
    for _ in range(ROUNDS):
        for name, (check, number) in checks.items():
            rounds[name].append(timeit.timeit(check, number=number) / number)
    return {name: median(seconds) for name, seconds in rounds.items()}
