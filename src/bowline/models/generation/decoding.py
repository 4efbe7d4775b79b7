"""Step-by-step decoding: from new tokens to the logits of the next, with cache, mask and positions kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

__all__ = ["Decoding"]


class Decoding:
    """One run of a model over a batch of prompts (B, T); beam search expands it to B times k rows.

    `begin` are the tokens of the first call: the prompts, or one start token per row for an encoder-decoder. `mask` is
    the mask of the prompts, (B, T), or `None` if every token counts; new tokens always count.
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
            self.mask = torch.cat([mask, mask.new_ones(len(mask), new_tokens)], 1)  # full length at once
            self.positions = (self.mask.cumsum(-1) - 1).clamp_min(0)  # (B, T + new), 0 at left padding

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Feed `tokens` (N, t) to the model and return the logits (N, V), float32, of the next token."""
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
        """Repeat each row `times` times, so that a prompt is computed once for all its beams."""
        rows = torch.arange(len(self.begin), device=self.begin.device).repeat_interleave(times)
        self.mask = self.mask[rows] if self.mask is not None else None
        self.positions = self.positions[rows] if self.positions is not None else None
        if isinstance(self.encoded, torch.Tensor):
            self.encoded = self.encoded[rows]
        elif self.encoded is not None:
            self.encoded = dataclasses.replace(self.encoded, last_hidden_state=self.encoded.last_hidden_state[rows])
        self.reorder(rows)

    def reorder(self, rows: torch.Tensor) -> None:
        """Let row i continue from the state of row `rows[i]`. With beams, both rows belong to the same prompt."""
        if self.cache is not None:
            self.cache.reorder(rows)
        if self.tokens is not None:
            self.tokens = self.tokens[rows]


def _start(config: Any) -> int:
    """Return the decoder's first token."""
    start = config.decoder_start_token_id
    return (config.pad_token_id or 0) if start is None else start
