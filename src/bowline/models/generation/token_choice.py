"""From logits to a choice: penalties, and the draw from what top-k and top-p leave."""

from __future__ import annotations

import torch

from bowline.models.generation.generation_settings import Settings

__all__ = ["candidates", "choose", "ended", "penalised"]


def penalised(
    scores: torch.Tensor, settings: Settings, made: int, seen: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Scores (N, V) after the repetition penalty, without an end of text while fewer than `min_new_tokens` are `made`,
    and without what is not to begin. `seen` (N, T) are the tokens so far; those where `mask` (N, T or fewer) is 0 do
    not count.

    The penalty r (Keskar et al., 2019): s / r where s > 0, else s r, for each token that was seen.
    """
    if settings.repetition_penalty != 1.0:
        vocabulary = scores.shape[1]
        if mask is not None:
            padding = torch.zeros_like(seen, dtype=torch.bool)
            padding[:, : mask.shape[1]] = mask == 0
            seen = seen.masked_fill(padding, vocabulary)
        repeated = torch.zeros(len(scores), vocabulary + 1, dtype=torch.bool, device=scores.device)
        repeated = repeated.scatter_(1, seen.long(), True)[:, :vocabulary]
        factor = settings.repetition_penalty
        scores = torch.where(repeated, torch.where(scores < 0, scores * factor, scores / factor), scores)
    unwanted = settings.eos if made < settings.min_new_tokens else ()
    if not made:
        unwanted += settings.begin_suppress
    banned = [token for token in unwanted if token < scores.shape[1]]
    if banned:
        scores = scores.index_fill(1, torch.tensor(banned, device=scores.device), -torch.inf)
    return scores


def candidates(
    scores: torch.Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Probabilities (N, K) of what may be drawn, and which tokens (N, K) these are; `None` where it is all of them.

    softmax(scores / temperature) over the `top_k` likeliest tokens, and of these over the fewest whose probabilities
    add up to `top_p` (Holtzman et al., 2020): the likeliest one is always among them.

    Example:
        >>> probabilities, tokens = candidates(torch.tensor([[0.5, 0.2, 0.3]]).log(), top_p=0.75)
        >>> probabilities.mul(1000).round().tolist(), tokens.tolist()
        ([[625.0, 375.0, 0.0]], [[0, 2, 1]])
    """
    if temperature != 1.0:  # from the highest one down: near a temperature of 0 it stays 0, and all others are -inf
        numbers = torch.finfo(scores.dtype)
        scores = (scores - scores.amax(-1, keepdim=True)) / min(max(temperature, numbers.tiny), numbers.max)
    tokens = None
    if top_k is not None:
        scores, tokens = torch.topk(scores, min(top_k, scores.shape[1]))
    elif top_p is not None and top_p < 1:
        scores, tokens = torch.sort(scores, descending=True, stable=True)
    probabilities = scores.softmax(-1)
    if top_p is not None and top_p < 1:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
        probabilities[:, 0].clamp_min_(torch.finfo(probabilities.dtype).tiny)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities, tokens


def choose(scores: torch.Tensor, settings: Settings) -> torch.Tensor:
    """The next token (N,) of each row: the likeliest, or one that is drawn."""
    if not settings.do_sample:
        return scores.argmax(-1)
    probabilities, tokens = candidates(
        scores, temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p
    )
    drawn = torch.multinomial(probabilities, 1, generator=settings.generator)  # (N, 1)
    return (drawn if tokens is None else tokens.gather(1, drawn))[:, 0]


def ended(made: torch.Tensor, ends: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """Which rows (..., T) of new tokens end in one of the sequences; (...)."""
    found = torch.zeros(made.shape[:-1], dtype=torch.bool, device=made.device)
    single = [end[0] for end in ends if len(end) == 1]
    for token in single:
        found |= made[..., -1] == token
    for end in ends:
        if 1 < len(end) <= made.shape[-1]:
            found |= (made[..., -len(end) :] == torch.tensor(end, device=made.device)).all(-1)
    return found
