"""A training run of a small GPT-2 with measurements along the way, which several questions share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bowline import geometry
from bowline.models import GPT2LMHeadModel
from bowline.nn.modules.gradient_split import split_gradient
from bowline.study.experiment_sizes import ExperimentSizes
from bowline.study.experiments import Experiments
from bowline.study.row_search import searches
from bowline.study.small_models import build, held_out_loss, learn, look_steps
from bowline.study.study_text import prepared
from bowline.train.loop.batches import Batches

__all__ = ["equal_width", "observed_run", "runs"]

FREQUENT = 400
"""The number of frequent tokens whose pairwise cosines are compared between two tables."""


def runs(experiments: Experiments, *, tied: bool, width: int | None = None, few: bool = False) -> list[dict[str, Any]]:
    """Return the run of each seed, from the files of earlier experiments if another question needed it before."""
    setting = experiments.setting
    return [
        experiments.unit(
            observed_run,
            setting=setting.as_dict(),
            tied=tied,
            width=width or setting.hidden_size,
            few=few,
            seed=seed,
        )
        for seed in range(setting.seeds)
    ]


def equal_width(setting: ExperimentSizes) -> int:
    """Return the width at which the untied model is closest in parameters to the setting's tied model.

    The width is a multiple of the number of heads.

    Example:
        >>> equal_width(ExperimentSizes())
        72
    """
    goal = _parameters(setting, setting.hidden_size, tied=True)
    widths = range(setting.heads, setting.hidden_size + 1, setting.heads)
    return min(widths, key=lambda width: abs(_parameters(setting, width, tied=False) - goal))


def _parameters(setting: ExperimentSizes, width: int, *, tied: bool) -> int:
    with torch.device("meta"):
        model = build("gpt2", setting, seed=0, width=width, tie_word_embeddings=tied)
    return int(model.num_parameters())


def observed_run(setting: dict[str, Any], tied: bool, width: int, few: bool, seed: int, text: Path) -> dict[str, Any]:
    """Train a model, and measure losses, both ends' gradient, the table's geometry, and h . e_i as a search.

    With `few`, the text is `few_tokens` long and is read again and again.
    """
    sizes = ExperimentSizes(**setting)
    data = prepared(text, "gpt2", sizes)
    batches = data.batches(seed=seed, tokens=sizes.few_tokens if few else None)
    model = build("gpt2", sizes, seed=seed, width=width, tie_word_embeddings=tied)
    probe = next(iter(batches.held_out()))
    frequent = np.argsort(-data.counts)[:FREQUENT]

    def look() -> dict[str, Any]:
        table, head = _table(model.transformer.wte.weight), _table(model.lm_head.weight)
        return {
            "held_out": held_out_loss(model, batches),
            "split": _split(model, probe),
            "table": _geometry(table, sizes),
            "head": None if tied else _geometry(head, sizes),
            "alike": None if tied else _alike(table[frequent], head[frequent]),
            "search": _search(model, batches, sizes),
        }

    looks = learn(model, batches, sizes, steps=sizes.steps, seed=seed, look=look, at=look_steps(sizes.steps))
    return {"parameters": model.num_parameters(), "width": width, "looks": looks}


def _table(weight: torch.Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = weight.detach().numpy().copy()
    return array


def _split(model: GPT2LMHeadModel, batch: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the norms of both ends' parts of the gradient; untied, they are the gradients of two matrices."""
    model.zero_grad(set_to_none=True)
    with split_gradient(model) as split:
        model(**batch).loss.backward()
    found = split.read()
    table, head = model.transformer.wte.weight.grad, model.lm_head.weight.grad
    model.zero_grad(set_to_none=True)
    if found is not None:
        return {"output": found.output, "input": found.input, "total": found.total, "cosine": found.cosine}
    assert table is not None and head is not None, "untied, each end has its own"
    cosine = torch.nn.functional.cosine_similarity(table.flatten(), head.flatten(), dim=0)
    return {
        "output": float(head.norm()),
        "input": float(table.norm()),
        "total": float((table + head).norm()),
        "cosine": float(cosine),
    }


def _geometry(table: npt.NDArray[np.float32], setting: ExperimentSizes) -> dict[str, float | None]:
    rows = geometry.Rows(table)
    return {
        "identity_distance": geometry.identity_distance(rows),
        "identity_bound": geometry.identity_bound(*table.shape),
        "tight_frame_distance": geometry.tight_frame_distance(rows),
        "participation_ratio": geometry.participation_ratio(rows),
        "mean_cosine": geometry.mean_cosine(rows),
        "mean_squared_cosine": geometry.mean_squared_cosine(rows),
        "self_decoding": geometry.self_decoding_rate(rows),
    }


def _alike(first: npt.NDArray[np.float32], second: npt.NDArray[np.float32]) -> float:
    """Return the correlation of two tables' pairwise cosines for the same tokens (Press and Wolf, 2016)."""
    pairs = np.triu_indices(len(first), 1)
    cosines = []
    for table in (first, second):
        unit = table / np.linalg.norm(table, axis=1, keepdims=True)
        cosines.append((unit @ unit.T)[pairs])
    return float(np.corrcoef(cosines[0], cosines[1])[0, 1])


@torch.no_grad()
def _search(model: GPT2LMHeadModel, batches: Batches, setting: ExperimentSizes) -> dict[str, float]:
    """Search the head's rows by h . e_i, for hidden states of held-out text and their next tokens."""
    states, labels = [], []
    for batch in batches.held_out():
        hidden = model.transformer(batch["input_ids"]).last_hidden_state
        states.append(hidden[:, :-1].flatten(0, 1))
        labels.append(batch["labels"][:, 1:].flatten())
        if sum(len(some) for some in labels) >= setting.queries:
            break
    queries, right = torch.cat(states)[: setting.queries], torch.cat(labels)[: setting.queries]
    return searches(queries, model.lm_head.weight, right)
