"""Beam search with transformers' arithmetic: batches, length penalty, early stopping."""

from __future__ import annotations

from typing import Any

import torch

from bowline.models.generation.decoding import Decoding
from bowline.models.generation.generation_settings import Settings
from bowline.models.generation.token_choice import ended, penalised

__all__ = ["beam_search"]

NEVER = -1.0e9
"""The penalty of beams that must not be chosen. It is added, so that these beams keep their order."""


@torch.no_grad()
def beam_search(model: Any, input_ids: torch.Tensor, mask: torch.Tensor | None, settings: Settings) -> torch.Tensor:
    """Return the best of `num_beams` hypotheses for each row: (B, T) to (B, T + new), padded after the end.

    score = sum of log p / length ** length_penalty, where the length counts only new tokens. `early_stopping` says when
    a row is done. False: no running beam can beat the row's worst finished one at the current length. "never": nor at
    the most favourable length. True: `num_beams` beams are finished, and then all rows must be done together.
    """
    beams, new = settings.num_beams, settings.max_new_tokens
    run = Decoding(model, input_ids, mask, new, use_cache=settings.use_cache)
    batch, device = len(input_ids), input_ids.device
    prompt = run.begin.repeat_interleave(beams, 0)  # (B k, T)
    seen = None if model.config.is_encoder_decoder or mask is None else mask.repeat_interleave(beams, 0)
    keep = max(2, 1 + len(settings.ends)) * beams  # enough that `beams` unfinished ones are left
    offset = torch.arange(batch, device=device)[:, None] * beams

    running = torch.full((batch, beams, new), _filler(settings), dtype=torch.int64, device=device)
    finished = running.clone()
    running_scores = torch.zeros(batch, beams, device=device)
    running_scores[:, 1:] = NEVER  # all beams begin alike, so only the first counts
    scores = torch.full((batch, beams), NEVER, device=device)
    lengths = torch.zeros(batch, beams, dtype=torch.int64, device=device)
    done = torch.zeros(batch, beams, dtype=torch.bool, device=device)
    hopeful = torch.ones(batch, 1, dtype=torch.bool, device=device)  # rows in which a running beam can still win
    tokens = run.begin

    for made in range(new):
        logits = run.logits(tokens)
        if not made:
            run.repeat(beams)
            logits = logits.repeat_interleave(beams, 0)
        so_far = (
            torch.cat([prompt, running[:, :, :made].flatten(0, 1)], 1) if settings.repetition_penalty != 1 else prompt
        )
        step = penalised(logits.log_softmax(-1), settings, made, so_far, seen)  # (B k, V)
        total = (step.view(batch, beams, -1) + running_scores[:, :, None]).flatten(1)  # (B, k V)
        best, index = torch.topk(total, min(keep, total.shape[1]))  # (B, K)
        parent = index // step.shape[1]
        paths = _rows(running, parent)
        paths[:, :, made] = index % step.shape[1]
        length = made + 1
        ends = ended(paths[:, :, :length], settings.ends) if length < new else torch.ones_like(best, dtype=torch.bool)

        going = best + ends.float() * NEVER
        order = torch.topk(going, beams)[1]
        running, running_scores = _rows(paths, order), going.gather(1, order)

        just = ends.clone()
        just[:, beams:] = False  # only the best `num_beams` can finish; the others are reserves
        full = done.all(-1, keepdim=True) & (settings.early_stopping is True)
        ranked = best / length**settings.length_penalty
        ranked = ranked + full.float() * NEVER + (~hopeful).float() * NEVER + (~just).float() * NEVER
        scores, chosen = torch.topk(torch.cat([scores, ranked], 1), beams)
        finished = _rows(torch.cat([finished, paths], 1), chosen)
        lengths = torch.cat([lengths, torch.full_like(index, length)], 1).gather(1, chosen)
        done = torch.cat([done, just], 1).gather(1, chosen)

        reach = new if settings.early_stopping == "never" and settings.length_penalty > 0 else length
        worst = torch.where(done, scores.min(1, keepdim=True)[0], NEVER)
        possible = running_scores[:, :1] / reach**settings.length_penalty
        hopeful = hopeful & (possible > worst).any(-1, keepdim=True)
        over = ~hopeful.any() | ends.all() | (done.all() if settings.early_stopping is True else ends.all())
        if length == new or over:
            break
        run.reorder((parent.gather(1, order) + offset).flatten())
        tokens = running[:, :, made].reshape(-1, 1)

    return torch.cat([run.begin, finished[:, 0, : int(lengths[:, 0].max())]], 1)


def _filler(settings: Settings) -> int:
    """Return the token after an end: padding; as in transformers, the end of text if padding is token 0."""
    if settings.eos:
        return settings.pad or settings.eos[0]
    return -1 if settings.pad is None else settings.pad


def _rows(sequences: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Select the sequences (B, n, T) at `index` (B, m): (B, m, T)."""
    return sequences.gather(1, index[:, :, None].expand(-1, -1, sequences.shape[2]))
