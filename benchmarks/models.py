"""A training step and cached generation of each family, beside transformers on the same weights, in one run.

A step is the forward pass with labels and the backward pass, in training mode with the dropout that the configs have;
the optimizer, which both would share, is left out, and gradients are dropped between steps. Generation is greedy, 64
new tokens after the prompt, nothing ends early. Both models are in one process for the times, and take turns.

For the memory each runs in a process of its own: one call to warm up, freed memory given back to the system, the
kernel's high-water mark of resident memory set back (`/proc/self/clear_refs`), one call, and the mark read: what that
call needed at its peak above the resident model, gradients included.
"""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.measure import machine, median, peak_of

__all__ = ["CASES", "Case", "run"]

ROUNDS = 7
NEW_TOKENS = 64
OURS, THEIRS = "bowline", "transformers"
LIBRARIES = (THEIRS, OURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model's shape, a task, and how many tokens it is given."""

    name: str
    family: str
    model: str
    task: str
    batch: int
    length: int
    target: int = 0
    """Tokens of the target, behind an encoder."""
    labelled: float = 1.0
    """Share of the tokens that have a label."""
    config: tuple[tuple[str, Any], ...] = ()

    def build(self, library: str) -> Any:
        """The model of that library, its weights drawn from a fixed seed."""
        module = importlib.import_module(f"bowline.models.{self.family.lower()}" if library == OURS else "transformers")
        torch.manual_seed(0)
        config = getattr(module, f"{self.family}Config")(**dict(self.config))
        model = getattr(module, f"{self.family}{self.model}")(config)
        return model.train() if self.task == "step" else model.eval()

    def inputs(self, vocabulary: int) -> dict[str, torch.Tensor]:
        """The same tokens every time: no padding, no end of text."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(2, vocabulary, (self.batch, self.length), generator=generator)
        if self.task != "step":
            return {"input_ids": ids}
        size = (self.batch, self.target or self.length)
        labels = torch.randint(2, vocabulary, size, generator=generator)
        hidden = torch.rand(size, generator=generator) >= self.labelled
        return {"input_ids": ids, "labels": labels.masked_fill(hidden, -100)}

    def call(self, model: Any) -> Callable[[], torch.Tensor]:
        """The work: a step, which gives its loss, or a generation, which gives its tokens."""
        inputs = self.inputs(model.config.vocab_size)

        def step() -> torch.Tensor:
            loss: torch.Tensor = model(**inputs).loss
            loss.backward()
            return loss.detach()

        def generate() -> torch.Tensor:
            tokens: torch.Tensor = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
            return tokens

        return step if self.task == "step" else generate


GPT2 = Case(name="GPT-2 small", family="GPT2", model="LMHeadModel", task="step", batch=1, length=512)
BERT = Case(
    name="BERT base, 15 % labelled", family="Bert", model="ForMaskedLM", task="step", batch=2, length=256, labelled=0.15
)
T5 = Case(
    name="T5 small",
    family="T5",
    model="ForConditionalGeneration",
    task="step",
    batch=4,
    length=128,
    target=64,
    config=(("decoder_start_token_id", 0),),
)


def _texts(case: Case, batch: int) -> Case:
    """That model, generating: nothing may end early."""
    config = (*case.config, ("eos_token_id", None))
    return replace(case, task="generate", batch=batch, length=32, target=0, config=config)


CASES = {
    "gpt2-step": GPT2,
    "bert-step": BERT,
    "t5-step": T5,
    **{f"gpt2-generate-{batch}": _texts(GPT2, batch) for batch in (1, 4)},
    **{f"t5-generate-{batch}": _texts(T5, batch) for batch in (1, 4)},
}


def quiet() -> None:
    """No logs and no progress bars; transformers must not tell about losses that it does not know."""
    warnings.simplefilter("ignore")
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def seconds(case: Case, rounds: int = ROUNDS) -> dict[str, float]:
    """Each library's median time; they take turns, and who begins changes.

    Raises:
        RuntimeError: they do not compute the same, so a comparison would say nothing.
    """
    models = {library: case.build(library) for library in LIBRARIES}
    models[OURS].load_state_dict(models[THEIRS].state_dict())
    calls = {library: case.call(model) for library, model in models.items()}
    results = []
    for library, model in models.items():  # this also warms up
        training = model.training
        results.append(calls[library]() if not training else case.call(model.eval())())
        model.train(training).zero_grad()
    if case.task == "step":
        torch.testing.assert_close(*results, rtol=1e-5, atol=0.0)
    elif not torch.equal(*results):
        raise RuntimeError(f"{case.name}: the two libraries generate different tokens")
    times: dict[str, list[float]] = {library: [] for library in LIBRARIES}
    for number in range(rounds + 1):  # the first round, in which dropout is warmed up, does not count
        for library in LIBRARIES if number % 2 else reversed(LIBRARIES):
            started = time.perf_counter()
            calls[library]()
            times[library].append(time.perf_counter() - started)
            models[library].zero_grad()
    return {library: median(many[1:]) for library, many in times.items()}


def peak_megabytes(name: str, library: str) -> float:
    """Peak resident memory of one call above the resident model, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.models", name, library]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def _peak_here(case: Case, library: str) -> float:
    model = case.build(library)
    return peak_of(case.call(model), model.zero_grad)


def table(title: str, cases: dict[str, Case]) -> str:
    """Markdown: times and peaks of both, and ours as a share of theirs."""
    lines = [
        f"## {title}",
        "",
        "| model, tokens | transformers s | bowline s | ours / theirs | transformers MB | bowline MB | ours / theirs |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, case in cases.items():
        took = seconds(case)
        gc.collect()
        peak = {library: peak_megabytes(name, library) for library in LIBRARIES}
        times = f"{took[THEIRS]:.3f} | {took[OURS]:.3f} | {took[OURS] / took[THEIRS]:.2f}"
        peaks = f"{peak[THEIRS]:.0f} | {peak[OURS]:.0f} | {peak[OURS] / peak[THEIRS]:.2f}"
        tokens = f"{case.batch} x {case.length}" + (f" to {case.batch} x {case.target}" if case.target else "")
        lines.append(f"| {case.name}, {tokens} | {times} | {peaks} |")
    return "\n".join(lines)


def run() -> str:
    """All of it, as Markdown."""
    quiet()
    steps = {name: case for name, case in CASES.items() if case.task == "step"}
    texts = {name: case for name, case in CASES.items() if case.task != "step"}
    return "\n\n".join(
        [
            "# Training and generation, beside transformers",
            "The same weights, float32, transformers with its default attention (sdpa). Time: median of "
            f"{ROUNDS} interleaved rounds, {torch.get_num_threads()} threads. Memory: peak resident memory above the "
            "resident model, gradients included, each in its own process.",
            machine(["bowline-ties", "torch", "transformers"]),
            table("A training step: forward, backward, dropout", steps),
            table(f"Greedy generation, {NEW_TOKENS} new tokens, with the cache", texts),
        ]
    )


if __name__ == "__main__":
    quiet()
    print(_peak_here(CASES[sys.argv[1]], sys.argv[2]))
