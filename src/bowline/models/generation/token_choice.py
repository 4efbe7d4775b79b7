"""Choosing the next token from logits: penalties, top-k, top-p, and the draw."""

from __future__ import annotations

import torch

from bowline.models.generation.generation_settings import Settings

__all__ = ["candidates", "choose", "ended", "penalised"]


def penalised(
    scores: torch.Tensor, settings: Settings, made: int, seen: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Apply the repetition penalty to scores (N, V), and set the scores of forbidden tokens to -inf.

    The end of text is forbidden while fewer than `min_new_tokens` tokens are `made`, and `begin_suppress_tokens` before
    the first one. `seen` (N, T) are the tokens so far; those whose `mask` (N, T or fewer) is 0 do not count.

    The penalty r (Keskar et al., 2019) changes the score s of each seen token to s / r if s > 0, else to s r.
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
    """Return the probabilities (N, K) of the tokens that can be drawn, and their ids (N, K), `None` for all tokens.

    softmax(scores / temperature) over the `top_k` likeliest tokens, restricted to the fewest of them whose
    probabilities add up to `top_p` (Holtzman et al., 2020). The likeliest token is always included.

    Example:
        >>> probabilities, tokens = candidates(torch.tensor([[0.5, 0.2, 0.3]]).log(), top_p=0.75)
        >>> probabilities.mul(1000).round().tolist(), tokens.tolist()
        ([[625.0, 375.0, 0.0]], [[0, 2, 1]])
    """
    if temperature != 1.0:  # relative to the highest score, which stays 0 near a temperature of 0
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
    """Return the next token (N,) of each row: the likeliest one, or a drawn one."""
    if not settings.do_sample:
        return scores.argmax(-1)
    probabilities, tokens = candidates(
        scores, temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p
    )
    drawn = torch.multinomial(probabilities, 1, generator=settings.generator)  # (N, 1)
    return (drawn if tokens is None else tokens.gather(1, drawn))[:, 0]


def ended(made: torch.Tensor, ends: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """Tell for each row (..., T) of new tokens whether it ends in one of the sequences; the result is (...)."""
    found = torch.zeros(made.shape[:-1], dtype=torch.bool, device=made.device)
    single = [end[0] for end in ends if len(end) == 1]
    for token in single:
        found |= made[..., -1] == token
    for end in ends:
        if 1 < len(end) <= made.shape[-1]:
            found |= (made[..., -len(end) :] == torch.tensor(end, device=made.device)).all(-1)
    return found
