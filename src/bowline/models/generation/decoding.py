"""The model as a function from new tokens to the logits of the next: it carries cache, mask and positions along."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

__all__ = ["Decoding"]


class Decoding:
    """One run of a model over a batch of prompts (B, T), which may become B times k rows when beams begin.

    `begin` are the tokens that the first call takes: the prompts, or a start token each behind an encoder. `mask` is
    the prompts', (B, T), or `None` where every token counts; it is one wherever a token is new.
    """

    def __init__(
        self, model: Any, input_ids: torch.Tensor, mask: torch.Tensor | None, new_tokens: int, *, use_cache: bool
    ) -> None:
        self.model = model
        self.use_cache = use_cache
        self.seen = 0
        self.cache: Any = None
        self.encoded: Any = None
        self.tokens: torch.Tensor | None = None
        self.positions: torch.Tensor | None = None
        self.mask = mask
        self.begin = input_ids
        if model.config.is_encoder_decoder:
            self.encoded = model.encode(input_ids, attention_mask=mask)
            self.begin = input_ids.new_full((len(input_ids), 1), _start(model.config))
        elif mask is not None:
            self.mask = torch.cat([mask, mask.new_ones(len(mask), new_tokens)], 1)  # whole: nothing grows step by step
            self.positions = (self.mask.cumsum(-1) - 1).clamp_min(0)  # (B, T + new), 0 at the padding on the left

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits (N, V), float32, of what follows once `tokens` (N, t) are seen too."""
        if not self.use_cache:
            self.tokens = tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], 1)
            self.seen = 0
        start, self.seen = self.seen, self.seen + tokens.shape[1]
        inputs: dict[str, Any] = {"use_cache": self.use_cache, "logits_to_keep": 1}
        if self.cache is not None:
            inputs["past_key_values"] = self.cache
        if self.encoded is not None:
            inputs.update(decoder_input_ids=tokens, encoder_outputs=self.encoded, attention_mask=self.mask)
        else:
            inputs["input_ids"] = tokens
            if self.mask is not None and self.positions is not None:
                inputs["attention_mask"] = self.mask[:, : self.seen]
                if self.model.uses_position_ids:
                    inputs["position_ids"] = self.positions[:, start : self.seen]
        output = self.model(**inputs)
        if self.use_cache:
            self.cache = output.past_key_values
        return output.logits[:, -1].float()

    def repeat(self, times: int) -> None:
        """Each row `times` times in a row: the prompt is computed once for all of its beams."""
        rows = torch.arange(len(self.begin), device=self.begin.device).repeat_interleave(times)
        self.mask = self.mask[rows] if self.mask is not None else None
        self.positions = self.positions[rows] if self.positions is not None else None
        if isinstance(self.encoded, torch.Tensor):
            self.encoded = self.encoded[rows]
        elif self.encoded is not None:
            self.encoded = dataclasses.replace(self.encoded, last_hidden_state=self.encoded.last_hidden_state[rows])
        self.reorder(rows)

    def reorder(self, rows: torch.Tensor) -> None:
        """Row i goes on from what row `rows[i]` has seen; both are of one prompt, once beams have begun."""
        if self.cache is not None:
            self.cache.reorder(rows)
        if self.tokens is not None:
            self.tokens = self.tokens[rows]


def _start(config: Any) -> int:
    """The decoder's first token."""
    start = config.decoder_start_token_id
    return (config.pad_token_id or 0) if start is None else start
