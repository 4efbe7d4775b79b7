"""The methods `generate` and `stream` of classes with a head for next tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from bowline.errors import UsageError
from bowline.models.generation.beam_search import beam_search
from bowline.models.generation.decoding import Decoding
from bowline.models.generation.generation_settings import Settings, checked_mask, settings_for
from bowline.models.generation.token_choice import choose, ended, penalised

__all__ = ["GenerationMixin"]


class GenerationMixin:
    """Generate next tokens, one after another.

    Set `uses_position_ids` in a class whose forward takes `position_ids`. Gradients are not recorded. The mode is not
    changed: a model in training mode applies dropout here too.
    """

    uses_position_ids: ClassVar[bool] = False
    config: Any

    def generate(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        min_new_tokens: int = 0,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        num_beams: int = 1,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        repetition_penalty: float = 1.0,
        begin_suppress_tokens: Sequence[int] = (),
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        stop: int | Sequence[int | Sequence[int]] | None = None,
        generator: torch.Generator | None = None,
        use_cache: bool = True,
        streamer: Callable[[list[int]], object] | None = None,
    ) -> torch.Tensor:
        """Return prompts (B, T) with their continuations, (B, T + new).

        An encoder-decoder returns a start token and the decoder's output. The ids equal those of transformers'
        `generate` with the same arguments. A row that has ended is padded.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 0 at padding, which is on the left of a decoder's prompts. Without it, padding
                tokens in these prompts count as padding, unless they also end texts; an encoder sees every token.
            max_new_tokens: the largest number of new tokens; 20 by default.
            max_length: the largest number of prompt and new tokens together, instead of `max_new_tokens`.
            min_new_tokens: the text cannot end before this many new tokens.
            do_sample: draw the next token; otherwise take the likeliest.
            temperature: divides the logits before a draw.
            top_k: draw from this many of the likeliest tokens.
            top_p: draw from the fewest tokens that together have this probability.
            num_beams: the number of hypotheses that beam search follows at once.
            length_penalty: beams are compared by log p / length ** length_penalty.
            early_stopping: see `bowline.models.generation.beam_search.beam_search`.
            repetition_penalty: divides positive scores of tokens already seen, and multiplies negative ones.
            begin_suppress_tokens: tokens that cannot be the first new token.
            eos_token_id: tokens that end a row, instead of the config's; `[]` for no such token.
            pad_token_id: the token after the end, instead of the config's; without either, the end of text.
            stop: more tokens, or sequences of tokens, that end a row once they are generated.
            generator: the source of random numbers.
            use_cache: compute keys and values once. Without a cache the ids are the same, but slower.
            streamer: called with the new ids of each step; the batch must have one row.

        Raises:
            UsageError: an invalid argument, an empty batch, or more tokens than there are positions.

        Example:
            >>> from bowline.models.gpt2 import GPT2Config, GPT2LMHeadModel
            >>> config = GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2, n_positions=16)
            >>> GPT2LMHeadModel(config).eval().generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4).shape
            torch.Size([1, 7])
        """
        settings = settings_for(
            self,
            input_ids,
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            min_new_tokens=min_new_tokens,
            do_sample=do_sample,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            num_beams=num_beams,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            repetition_penalty=repetition_penalty,
            begin_suppress_tokens=begin_suppress_tokens,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            stop=stop,
            generator=generator,
            use_cache=use_cache,
        )
        if streamer is not None:
            if not callable(streamer):
                raise UsageError(
                    f"streamer is a {type(streamer).__name__}: expected a function that takes a list of new ids"
                )
            _one_row(input_ids, settings)
        mask = checked_mask(attention_mask, input_ids, settings, left=not self.config.is_encoder_decoder)
        if settings.num_beams > 1:
            return beam_search(self, input_ids, mask, settings)
        ids = input_ids
        for step in _steps(self, input_ids, mask, settings):
            ids = step
            if streamer is not None:
                streamer(step[:, -1].tolist())
        return ids.contiguous()

    def stream(
        self, input_ids: torch.Tensor, *, attention_mask: torch.Tensor | None = None, **options: Any
    ) -> Iterator[int]:
        """Yield the new ids of one row as they are generated. `options` are those of `generate`, except `streamer`.

        Raises:
            UsageError: as `generate`; raised at the call, before the first id is requested.
        """
        settings = settings_for(self, input_ids, **options)
        _one_row(input_ids, settings)
        mask = checked_mask(attention_mask, input_ids, settings, left=not self.config.is_encoder_decoder)
        return (int(step[0, -1]) for step in _steps(self, input_ids, mask, settings))


def _one_row(input_ids: torch.Tensor, settings: Settings) -> None:
    if len(input_ids) > 1 or settings.num_beams > 1:
        raise UsageError(
            f"a stream of {len(input_ids)} rows and num_beams={settings.num_beams}: expected one row and one beam",
            help="generate without streaming, because beam search may still change earlier tokens",
        )


@torch.no_grad()
def _steps(
    model: Any, input_ids: torch.Tensor, mask: torch.Tensor | None, settings: Settings
) -> Iterator[torch.Tensor]:
    """Yield all ids so far, (B, T + made), after each step."""
    run = Decoding(model, input_ids, mask, settings.max_new_tokens, use_cache=settings.use_cache)
    counted = None if model.config.is_encoder_decoder else mask
    begin = run.begin.shape[1]
    ids = torch.cat([run.begin, run.begin.new_empty(len(run.begin), settings.max_new_tokens)], 1)
    over = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    tokens = run.begin
    for made in range(settings.max_new_tokens):
        at = begin + made
        chosen = choose(penalised(run.logits(tokens), settings, made, ids[:, :at], counted), settings)
        if settings.ends:
            if settings.pad is not None:
                chosen = torch.where(over, settings.pad, chosen)
            ids[:, at] = chosen
            over |= ended(ids[:, begin : at + 1], settings.ends)
        else:
            ids[:, at] = chosen
        yield ids[:, : at + 1]
        if settings.ends and bool(over.all()):
            return
        tokens = chosen[:, None]
