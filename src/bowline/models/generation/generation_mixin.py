"""`generate` and `stream`: what a class with a head for next tokens can do."""

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
    """Next tokens, one after the other. A class whose forward takes `position_ids` says so: `uses_position_ids`.

    Nothing is recorded for gradients. The mode stays as it is: in training mode, dropout is at work here too.
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
        """Prompts (B, T) and what follows them, (B, T + new); behind an encoder, a start token and what follows it.

        The ids are those of transformers' `generate` with the same arguments; a row that has ended is padded.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 0 at padding, which is on the left of a decoder's prompts. Without it, padding
                tokens in these are taken for padding, unless they end texts too; an encoder sees every token.
            max_new_tokens: 20 where nothing is said.
            max_length: in its place, prompt and new tokens together.
            min_new_tokens: no end of text before.
            do_sample: draw the next token; otherwise it is the likeliest.
            temperature: divides the logits before a draw.
            top_k: draw from so many of the likeliest tokens.
            top_p: draw from the fewest tokens that have this much probability together.
            num_beams: hypotheses that are followed at once.
            length_penalty: beams are compared by log p / length ** length_penalty.
            early_stopping: see `bowline.models.generation.beam_search.beam_search`.
            repetition_penalty: divides the scores of tokens that were seen, where these are positive, else multiplies.
            begin_suppress_tokens: the first new token is none of these.
            eos_token_id: what ends a row, in place of the config's; `[]` for nothing.
            pad_token_id: what follows the end, in place of the config's, which else is the end of text.
            stop: tokens or sequences of tokens that end a row as well, once they are among the new ones.
            generator: where draws come from.
            use_cache: compute keys and values once; without, the same ids, slower.
            streamer: called with each step's new ids, one row's.

        Raises:
            UsageError: an argument that means nothing, an empty batch, or more tokens than there are positions.

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
                raise UsageError(f"streamer is a {type(streamer).__name__}: expected a function of a step's new ids")
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
        """The new ids of one row, each as soon as it is there. `options` are those of `generate`, but for `streamer`.

        Raises:
            UsageError: as `generate`; and at once, not when the first id is asked for.
        """
        settings = settings_for(self, input_ids, **options)
        _one_row(input_ids, settings)
        mask = checked_mask(attention_mask, input_ids, settings, left=not self.config.is_encoder_decoder)
        return (int(step[0, -1]) for step in _steps(self, input_ids, mask, settings))


def _one_row(input_ids: torch.Tensor, settings: Settings) -> None:
    if len(input_ids) > 1 or settings.num_beams > 1:
        raise UsageError(
            f"a stream of {len(input_ids)} rows and num_beams={settings.num_beams}: expected one of each",
            help="generate without a streamer; what a beam begins with may yet change",
        )


@torch.no_grad()
def _steps(
    model: Any, input_ids: torch.Tensor, mask: torch.Tensor | None, settings: Settings
) -> Iterator[torch.Tensor]:
    """After each step all ids so far, (B, T + made)."""
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
