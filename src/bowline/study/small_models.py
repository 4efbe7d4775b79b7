"""The small models of the experiments, and training them with `bowline.train`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bowline.models import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)
from bowline.nn.init.init_weights import init_weights
from bowline.study.experiment_sizes import ExperimentSizes
from bowline.train.loop.batches import Batches
from bowline.train.loop.trainer import Trainer
from bowline.train.loop.trainer_settings import TrainerSettings

__all__ = ["Later", "build", "held_out_loss", "learn", "look_steps", "mean_curve"]


def build(
    family: str,
    setting: ExperimentSizes,
    *,
    seed: int,
    width: int | None = None,
    recipe: str | None = None,
    **config: Any,
) -> Any:
    """Build a small model of a family without dropout, drawn with `seed` by the family's own draw or a recipe.

    `config` are more keys of the family's config.
    """
    width = width or setting.hidden_size
    heads = setting.heads
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module
        if family == "gpt2":
            model = GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=setting.vocab_size,
                    n_embd=width,
                    n_layer=setting.layers,
                    n_head=heads,
                    n_positions=setting.length,
                    resid_pdrop=0.0,
                    embd_pdrop=0.0,
                    attn_pdrop=0.0,
                    bos_token_id=None,
                    eos_token_id=None,
                    **config,
                )
            )
        elif family == "bert":
            model = BertForMaskedLM(
                BertConfig(
                    vocab_size=setting.vocab_size,
                    hidden_size=width,
                    num_hidden_layers=setting.layers,
                    num_attention_heads=heads,
                    intermediate_size=4 * width,
                    max_position_embeddings=setting.length,
                    hidden_dropout_prob=0.0,
                    attention_probs_dropout_prob=0.0,
                    **config,
                )
            )
        else:
            model = T5ForConditionalGeneration(
                T5Config(
                    vocab_size=setting.vocab_size,
                    d_model=width,
                    d_kv=width // heads,
                    d_ff=4 * width,
                    num_layers=setting.layers,
                    num_heads=heads,
                    dropout_rate=0.0,
                    **config,
                )
            )
    if recipe is not None:
        init_weights(model, recipe, seed=seed)
    return model


@dataclass(frozen=True)
class Later:
    """Batches from a later step on, so that a second phase of training sees text that the first did not."""

    batches: Batches
    steps: int

    def at(self, step: int, micro: int = 0) -> dict[str, torch.Tensor]:
        """Return the batch of a step."""
        return self.batches.at(step + self.steps, micro)

    def held_out(self) -> Iterable[dict[str, torch.Tensor]]:
        """Return the same held-out batches."""
        return self.batches.held_out()


def learn(
    model: nn.Module,
    batches: Batches,
    setting: ExperimentSizes,
    *,
    steps: int,
    seed: int,
    look: Callable[[], dict[str, Any]] | None = None,
    at: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """Train a model, and record {"step": ..., **look()} after each step of `at`; step 0 is before training."""
    seen: list[dict[str, Any]] = []

    def see(step: int) -> None:
        if look is not None and step in at:
            model.eval()
            seen.append({"step": step, **look()})
            model.train()

    see(0)
    settings = TrainerSettings(
        steps=steps,
        learning_rate=setting.learning_rate,
        seed=seed,
        log_every=steps,
        evaluate_every=steps,
        save_every=steps,
    )
    Trainer(model, _Unwatched(batches), settings, on_step=see).train()
    return seen


@dataclass(frozen=True)
class _Unwatched:
    """Batches without held-out ones, because `look` does the evaluation."""

    batches: Batches

    def at(self, step: int, micro: int = 0) -> dict[str, torch.Tensor]:
        return self.batches.at(step, micro)

    def held_out(self) -> Iterable[dict[str, torch.Tensor]]:
        return ()


def look_steps(steps: int) -> list[int]:
    """Return the steps at which a run is measured: closer together early, where most changes, all multiples of 10.

    Example:
        >>> look_steps(800)
        [0, 10, 20, 50, 100, 200, 500, 800]
    """
    found = {0, steps}
    for power in range(1, 1 + math.ceil(math.log10(max(steps, 10)))):
        found |= {part * 10**power for part in (1, 2, 5) if part * 10**power < 0.9 * steps}
    return sorted(found)


@torch.no_grad()
def held_out_loss(model: nn.Module, batches: Batches) -> float:
    """Return the mean held-out loss in eval mode, where each batch counts by its number of labels."""
    mode = model.training
    model.eval()
    total, count = 0.0, 0
    for batch in batches.held_out():
        labelled = int((batch["labels"] != -100).sum())
        total += float(model(**batch).loss) * labelled
        count += labelled
    model.train(mode)
    return total / max(1, count)


def mean_curve(curves: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Return the mean of several curves at each point, and its standard error."""
    from bowline.study.statistics import mean, standard_error

    places = list(zip(*curves, strict=True))
    return [mean(some) for some in places], [standard_error(some) for some in places]
