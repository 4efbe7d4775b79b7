"""Builds each model family tied and untied, and answers common questions about them in a line or two each."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bowline import models
from bowline.demo.audit_demo import make_console
from bowline.models.common.pretrained_model import PreTrainedModel
from bowline.nn import check_ties

__all__ = ["FamilyShow"]

WIDTH, LAYERS, STEPS = 128, 2, 20
FAMILIES: dict[str, Callable[[], Any]] = {
    "GPT-2": lambda: models.GPT2LMHeadModel(models.GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=4)),
    "BERT": lambda: models.BertForMaskedLM(
        models.BertConfig(
            hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=4 * WIDTH
        )
    ),
    "T5": lambda: models.T5ForConditionalGeneration(
        models.T5Config(d_model=WIDTH, d_kv=32, d_ff=4 * WIDTH, num_layers=LAYERS, num_heads=4)
    ),
    "LSTM": lambda: models.LSTMLMHeadModel(models.LSTMConfig(vocab_size=10_000, hidden_size=WIDTH, num_layers=LAYERS)),
}
"""Models with real vocabulary sizes (for the LSTM, that of the Penn Treebank) and few, narrow layers."""


class FamilyShow:
    """One run, printed to standard output. `problems` lists the unexpected results."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._console = make_console()

    def run(self) -> None:
        """Print the table of families, then the questions with their answers."""
        started = time.perf_counter()
        torch.manual_seed(0)
        self._say("\n== Each family, tied and untied ==\n")
        self._console.print(self._table())
        self._say("\n== What people ask ==")
        for question, answer in (
            ("Why is GPT-2's lm_head not a parameter?", self._head),
            ("What is the bias of BERT's head?", self._bias),
            ("Why is BERT's padding row not zero?", self._padding),
            ("How does the tie change T5's initial loss?", self._initial_loss),
        ):
            self._say(f"\n{question}")
            for line in answer():
                self._say(f"  {line}")
        for problem in self.problems:
            self._say(f"NOT AS EXPECTED: {problem}")
        self._say(f"\n{len(FAMILIES)} families in {time.perf_counter() - started:.1f} s.")

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for column in ("family", "V x D", "parameters, tied", "untied", "a tie saves", "file, tied", "untied"):
            table.add_column(column, justify="left" if column == "family" else "right")
        with tempfile.TemporaryDirectory(prefix="bowline-demo-") as directory:
            for name, build in FAMILIES.items():
                tied = build()
                untied = type(tied)(dataclasses.replace(tied.config, tie_word_embeddings=False))
                counts = tied.num_parameters(), untied.num_parameters()
                sizes = [_saved_bytes(model, Path(directory)) for model in (tied, untied)]
                rows, width = tied.get_input_embeddings().weight.shape
                self._expect(bool(check_ties(tied)), f"{name}: tied")
                self._expect(counts[1] - counts[0] >= rows * width, f"{name}: an untied head of its own")
                share = (counts[1] - counts[0]) / counts[1]
                table.add_row(
                    name,
                    f"{rows:,} x {width}",
                    f"{counts[0]:,}",
                    f"{counts[1]:,}",
                    f"{share:.0%}",
                    *(f"{size / 1e6:.1f} MB" for size in sizes),
                )
        return table

    def _head(self) -> Iterator[str]:
        model = FAMILIES["GPT-2"]()
        listed = [name for name, _ in model.named_parameters() if "lm_head" in name]
        held = [name for name in model.state_dict() if "lm_head" in name]
        shared = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        seen = listed or "nothing"
        yield f"named_parameters() lists {seen} for it, but state_dict() has {held[0]}: one tensor, two names."
        before = model.get_input_embeddings().weight.detach().clone()
        _train(model, torch.optim.SGD([model.get_output_embeddings().weight], lr=0.1), 1)
        moved = (model.get_input_embeddings().weight != before).any(-1).sum()
        yield f"One step on lm_head.weight alone changed {moved:,} of {len(before):,} rows of the embedding."
        self._expect(shared and not listed and moved > 0, "GPT-2's head is its embedding")

    def _bias(self) -> Iterator[str]:
        tied = FAMILIES["BERT"]()
        untied = type(tied)(dataclasses.replace(tied.config, tie_word_embeddings=False))
        names = "cls.predictions.bias", "cls.predictions.decoder.bias"
        one, two = ({name: model.get_parameter(name) for name in names} for model in (tied, untied))
        yield f"{tied.config.vocab_size:,} numbers added to the logits. Only the head has them, not the embedding."
        yield (
            f"Are {names[0]} and {names[1]} one parameter? Tied: {one[names[0]] is one[names[1]]}. Untied: "
            f"{two[names[0]] is two[names[1]]}, and the first is no longer used."
        )
        self._expect(one[names[0]] is one[names[1]] and two[names[0]] is not two[names[1]], "BERT's bias")

    def _padding(self) -> Iterator[str]:
        yield f"Padding is an input but never a label. Norm of its row before and after {STEPS} steps of AdamW:"
        for policy in ("keep", "mask"):
            config = models.BertConfig(
                vocab_size=500,
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=128,
                pad_logit=policy,
            )
            model: Any = models.BertForMaskedLM(config)
            row = model.get_input_embeddings().weight[0]
            before = row.norm().item()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            _train(model, optimizer, STEPS)
            after = model.get_input_embeddings().weight[0].norm().item()
            why = "its logit is in the softmax" if policy == "keep" else "its logit is -inf, so there is no gradient"
            yield f"pad_logit={policy!r}: {before:.3f} -> {after:.3f}   ({why})"
            self._expect(before == 0 and (after > 0) is (policy == "keep"), f"the padding row under {policy}")

    def _initial_loss(self) -> Iterator[str]:
        wide = models.T5Config(d_model=256, d_kv=32, d_ff=512, num_layers=2, num_heads=8)
        losses: dict[str, float] = {}
        forms: tuple[tuple[str, dict[str, Any]], ...] = (
            ("tied, scaled by d^-1/2 (v1.0)", {}),
            ("tied, not scaled", {"scale_decoder_outputs": False}),
            ("untied, head of std 1", {"tie_word_embeddings": False, "scale_decoder_outputs": False}),
        )
        for name, options in forms:
            model = models.T5ForConditionalGeneration(dataclasses.replace(wide, **options)).eval()
            ids = torch.randint(2, wide.vocab_size, (2, 32))
            with torch.no_grad():
                losses[name] = model(ids, labels=torch.randint(2, wide.vocab_size, (2, 32))).loss.item()
        yield f"The embedding is drawn with std 1. Loss before training (ln V = {math.log(wide.vocab_size):.1f}):"
        yield "; ".join(f"{name}: {loss:.1f}" for name, loss in losses.items())
        scaled, *others = losses.values()
        self._expect(all(loss > 3 * scaled for loss in others), "T5 without its scale starts far above ln V")

    def _expect(self, held: bool, what: str) -> None:
        if not held:
            self.problems.append(what)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _saved_bytes(model: PreTrainedModel, directory: Path) -> int:
    model.save_pretrained(directory)
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def _train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train on random tokens; the last quarter of each row is padding, which is never a label."""
    pad = model.config.pad_token_id or 0
    ids = torch.randint(pad + 1, model.config.vocab_size, (8, 16))
    ids[:, 12:] = pad
    labels = ids.masked_fill(ids == pad, -100)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(ids, attention_mask=(ids != pad).long(), labels=labels).loss.backward()
        optimizer.step()
