"""The base class of all models: drawing, tying, resizing, pruning, loading and saving.

`post_init` draws what a class adds and then ties, in the same order as transformers. `bowline.nn` handles ties, state
and vocabularies.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bowline.errors import BowlineError, ConfigError, TieError, UsageError
from bowline.functional.loss import linear_cross_entropy, linear_logits
from bowline.models.common.from_pretrained import from_pretrained
from bowline.models.common.kv_cache import KVCache
from bowline.models.common.model_config import PreTrainedConfig
from bowline.nn import resize_vocab, save_checkpoint, tie_weights, unique_parameters

__all__ = ["PreTrainedModel"]


class PreTrainedModel(nn.Module):
    """A model with a config.

    A family declares these class attributes: `ties`, {target: source}, made if `config.tie_word_embeddings` is true;
    `input_embeddings` and `output_embeddings`, the names of the table and of the head; `base_model_prefix`, the name
    under which a class with a head holds the model without one, and with which the names of its tensors begin.
    """

    config: Any
    config_class: ClassVar[type[PreTrainedConfig]]
    base_model_prefix: ClassVar[str] = ""
    ties: ClassVar[Mapping[str, str]] = {}
    input_embeddings: ClassVar[str] = ""
    output_embeddings: ClassVar[str | None] = None
    _keys_to_ignore_on_load_unexpected: ClassVar[tuple[str, ...]] = ()
    accepts_loss_kwargs: ClassVar[bool] = False
    """Tells transformers' Trainer that the loss is the mean over the given batch."""
    stand_ins: ClassVar[Mapping[str, str]] = {}
    """{name: another}: if a file has no tensor of the first name, the second one's values are used."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        if not isinstance(config, self.config_class):
            raise UsageError(
                f"{type(self).__name__}({type(config).__name__}): expected a {self.config_class.__name__}",
                help=f"make one from a mapping with {self.config_class.__name__}.from_dict",
            )
        self.config = copy.copy(config)  # a copy, so that changes to this model do not affect another model
        self.gradient_checkpointing = False
        self.loss_only = False  # True: a forward with `labels` returns no logits, which training does not need

    # --- drawing and tying --------------------------------------------------------------------------------------------

    def post_init(self) -> None:
        """End a constructor: prune heads, draw, then tie. Models inside this one have drawn themselves already."""
        for part in self.modules():
            if "config" in part.__dict__:  # one config for the whole model
                part.config = self.config
        self._prepare(self._own_modules())

    def init_weights(self) -> None:
        """Draw all parameters anew, then tie."""
        for part in self.modules():
            if isinstance(part, PreTrainedModel):
                part._draw(part._own_modules())
        self.tie_weights()

    def _prepare(self, modules: list[nn.Module]) -> None:
        if self.config.pruned_heads and not any(inner is not self for inner in self._inner()):
            self._check_heads(self.config.pruned_heads, ConfigError)
            self._prune(self.config.pruned_heads)
        if not any(parameter.is_meta for parameter in self.parameters()):  # on meta, values are loaded later
            self._draw(modules)
        self.tie_weights()

    def _inner(self) -> Iterator[PreTrainedModel]:
        return (part for part in self.modules() if isinstance(part, PreTrainedModel))

    def _own_modules(self) -> list[nn.Module]:
        """Return the modules that belong to no `PreTrainedModel` inside this one, innermost first."""
        theirs = {id(module) for part in self._inner() if part is not self for module in part.modules()}
        return [module for module in reversed(list(self.modules())) if id(module) not in theirs]

    @torch.no_grad()
    def _draw(self, modules: list[nn.Module]) -> None:
        for module in modules:
            self._init_weights(module)

    def _init_weights(self, module: nn.Module) -> None:
        """Draw one module's own parameters, after those of its children. Families override this for their own draws."""
        std: float = getattr(self.config, "initializer_range", 0.02)
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=std)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(std=std)
            if module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()
        elif isinstance(module, nn.LayerNorm):
            if module.elementwise_affine:
                module.weight.fill_(1.0)
            if module.bias is not None:
                module.bias.zero_()

    def tie_weights(self) -> None:
        """Make each declared tie one parameter, if the config says so: the head's weight then *is* the table's."""
        if self.ties and self.config.tie_word_embeddings:
            tie_weights(self, dict(self.ties), on_conflict="source")

    # --- the two ends -------------------------------------------------------------------------------------------------

    def get_input_embeddings(self) -> nn.Module:
        """Return the table in which ids are looked up."""
        return self.get_submodule(self.input_embeddings)

    def set_input_embeddings(self, new: nn.Module) -> None:
        """Replace the table; a tied head follows.

        Raises:
            TieError: the table has another shape than the tied head; the model is left unchanged.
            UsageError: `new` is not a module with a weight.
        """
        _check_end(new)
        before = self.get_input_embeddings()
        self._put_table(new)
        try:
            self.tie_weights()
        except TieError:
            self._put_table(before)
            raise

    def _put_table(self, new: nn.Module) -> None:
        """Put the table under every name that the model has for it."""
        self._set_module(self.input_embeddings, new)

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the head that makes logits, or `None` if the class has no head."""
        return self.get_submodule(self.output_embeddings) if self.output_embeddings else None

    def set_output_embeddings(self, new: nn.Module) -> None:
        """Replace the head. If `tie_word_embeddings` is true, the next `tie_weights` ties it to the table again."""
        if self.output_embeddings is None:
            raise UsageError(f"{type(self).__name__} has no head that predicts tokens", help="choose a class with one")
        _check_end(new)
        self._set_module(self.output_embeddings, new)

    def _set_module(self, name: str, new: nn.Module) -> None:
        path, _, last = name.rpartition(".")
        setattr(self.get_submodule(path), last, new)

    def resize_token_embeddings(
        self, new_num_tokens: int, pad_to_multiple_of: int | None = None, new_rows: Any = "mean"
    ) -> nn.Module:
        """Resize table, head, biases and config to `new_num_tokens` tokens, by `bowline.nn.resize_vocab`."""
        resize_vocab(self, new_num_tokens, new_rows=new_rows, pad_to_multiple_of=pad_to_multiple_of)
        return self.get_input_embeddings()

    # --- the whole ----------------------------------------------------------------------------------------------------

    @property
    def base_model(self) -> PreTrainedModel:
        """The model without its head."""
        inner = getattr(self, self.base_model_prefix, self) if self.base_model_prefix else self
        return inner if isinstance(inner, PreTrainedModel) else self

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point parameter."""
        return next(parameter.dtype for parameter in self.parameters() if parameter.is_floating_point())

    def num_parameters(self, *, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Count the numbers in the parameters. Each storage counts once, so a tied head adds nothing."""
        left_out = {
            id(module.weight) for module in self.modules() if exclude_embeddings and isinstance(module, nn.Embedding)
        }
        return sum(
            parameter.numel()
            for parameter in unique_parameters(self)
            if id(parameter) not in left_out and (parameter.requires_grad or not only_trainable)
        )

    def prune_heads(self, heads_to_prune: Mapping[int, list[int]]) -> None:
        """Remove attention heads, {layer: heads}, numbered as in the config; `config.pruned_heads` records them.

        Raises:
            UsageError: a layer or head that does not exist, or a layer that would have no head left.
        """
        if not isinstance(heads_to_prune, Mapping) or not all(
            isinstance(heads, Collection) and not isinstance(heads, str) for heads in heads_to_prune.values()
        ):
            raise UsageError(f"heads_to_prune={heads_to_prune!r:.60}: expected {{layer: [head, ...]}}")
        before = {at: set(heads) for at, heads in self.config.pruned_heads.items()}
        wanted = {at: set(heads) for at, heads in heads_to_prune.items()}
        merged = {at: sorted(before.get(at, set()) | wanted.get(at, set())) for at in sorted({*before, *wanted})}
        self._check_heads(merged, UsageError)
        now = {  # a head's place among those that are left
            at: [
                head - sum(gone < head for gone in before.get(at, ())) for head in sorted(heads - before.get(at, set()))
            ]
            for at, heads in wanted.items()
        }
        self._prune({at: heads for at, heads in now.items() if heads})
        for part in self._inner():
            object.__setattr__(part.config, "pruned_heads", merged)

    def _check_heads(self, pruned: Mapping[int, list[int]], error: type[BowlineError]) -> None:
        layers = getattr(self.config, "num_hidden_layers", 0)
        count = getattr(self.config, "num_attention_heads", 0)
        if pruned and not count:
            raise error(f"pruned_heads: {type(self).__name__} has no heads that can be pruned")
        for at, heads in pruned.items():
            if at not in range(layers):
                raise error(f"pruned_heads: layer {at!r}, expected one of 0 to {layers - 1}")
            strange = [head for head in heads if head not in range(count)]
            if strange:
                raise error(f"pruned_heads: head {strange[0]!r} of layer {at}, expected one of 0 to {count - 1}")
            if len(set(heads)) == count:
                raise error(f"pruned_heads: all {count} heads of layer {at}", help="keep at least one of them")

    def _prune(self, heads: Mapping[int, list[int]]) -> None:
        """Remove heads, numbered among those left now. A family's model without a head overrides this."""
        base = self.base_model
        if base is self:
            raise UsageError(f"{type(self).__name__} has no heads that can be pruned")
        base._prune(heads)

    def gradient_checkpointing_enable(self) -> None:
        """Keep only each block's input, and compute the rest again in the backward pass."""
        self._set_checkpointing(True)

    def gradient_checkpointing_disable(self) -> None:
        """Keep all activations for the backward pass."""
        self._set_checkpointing(False)

    def _set_checkpointing(self, value: bool) -> None:
        for part in self._inner():
            part.gradient_checkpointing = value

    def _run(self, block: Callable[..., Any], *args: Any) -> Any:
        """Run one block, with gradient checkpointing if enabled, but never with a cache, which must fill only once."""
        wanted = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if not wanted or any(isinstance(arg, KVCache) for arg in args):
            return block(*args)
        return checkpoint(block, *args, use_reentrant=False)

    def _logits_and_loss(
        self, hidden: torch.Tensor, head: Any, labels: torch.Tensor | None, *, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return logits (B, T, V) of `hidden` (B, T, D), and the mean cross entropy if `labels` (B, T) are given."""
        options = {"bias": bias, "logit_scale": self.config.logit_scale, "mask_ids": self.config.masked_ids}
        if labels is None:
            return linear_logits(hidden, head.weight, **options), None
        if self.loss_only:
            return None, linear_cross_entropy(hidden, head.weight, labels, **options)
        loss, logits = linear_cross_entropy(hidden, head.weight, labels, **options, return_logits=True)
        return logits, loss

    # --- files --------------------------------------------------------------------------------------------------------

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Make a model with newly drawn weights."""
        return cls(config)

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], **options: Any) -> Any:
        """Load a model from a checkpoint; the function `from_pretrained` describes the options."""
        return from_pretrained(cls, path, **options)

    def save_pretrained(self, directory: str | os.PathLike[str], *, max_shard_size: str | int = "5GB") -> None:
        """Save files that this class and transformers' class of the same name load, by `bowline.nn.save_checkpoint`."""
        save_checkpoint(self, directory, max_shard_size=max_shard_size)


def _check_end(new: Any) -> None:
    if not isinstance(new, nn.Module) or not isinstance(getattr(new, "weight", None), torch.Tensor):
        raise UsageError(f"{type(new).__name__}: expected a module with a weight, such as nn.Embedding or nn.Linear")
