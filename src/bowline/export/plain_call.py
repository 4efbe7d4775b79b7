"""A view of a model whose call takes tensors and gives tensors, as exporters need it, under the model's own names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bowline.errors import UsageError
from bowline.nn.tree.class_swap import swapped_class

__all__ = [
    "Example",
    "Inputs",
    "evaluating",
    "example_inputs",
    "names_of",
    "outputs_of",
    "plain_view",
    "resized",
    "values_of",
]

Example = tuple[torch.Tensor, ...] | Mapping[str, torch.Tensor]
Inputs = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
LENGTH = 7
"""Tokens of the example."""


def plain_view(model: nn.Module, inputs: Inputs) -> nn.Module:
    """A module on the same parameters, submodules and hooks, which takes `inputs` and gives tensors.

    Its call is the model's, without a cache. Its signature states the inputs, which exporters read.
    """
    kind = type(model)
    names = names_of(inputs)
    fixed = {"use_cache": False} if "use_cache" in inspect.signature(kind.forward).parameters else {}

    own = vars(model).get("forward")  # of the instance, as use_tied_loss and hooks of other libraries put there

    def forward(self: nn.Module, *tensors: torch.Tensor, **named: torch.Tensor) -> Any:
        if isinstance(inputs, dict):
            named, tensors = {**dict(zip(names, tensors, strict=False)), **named}, ()
        else:
            tensors, named = (*tensors, *named.values()), {}
        given = own(*tensors, **named, **fixed) if own is not None else kind.forward(self, *tensors, **named, **fixed)
        return outputs_of(given)

    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    stated = inspect.Signature([inspect.Parameter(name, either) for name in ("self", *names)])
    forward.__signature__ = stated  # type: ignore[attr-defined]
    made = swapped_class(kind, kind)
    made.forward = forward  # after the class is made: use_tied_loss wraps what a new subclass inherits
    view: nn.Module = object.__new__(made)
    view.__dict__.update({name: value for name, value in vars(model).items() if name != "forward"})
    return view


def names_of(inputs: Inputs) -> tuple[str, ...]:
    """The names of the inputs, or `input_0` and so on.

    Example:
        >>> names_of((torch.ones(1), torch.ones(1)))
        ('input_0', 'input_1')
    """
    return tuple(inputs) if isinstance(inputs, dict) else tuple(f"input_{at}" for at in range(len(inputs)))


def values_of(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """The inputs by position."""
    return tuple(inputs.values()) if isinstance(inputs, dict) else inputs


def outputs_of(given: Any) -> Any:
    """The tensors of a model's output: the logits, or without logits every tensor; one alone, or a tuple.

    Example:
        >>> outputs_of({"logits": torch.ones(1), "last_hidden_state": torch.zeros(1)})
        tensor([1.])
    """
    if isinstance(given, torch.Tensor):
        return given
    if isinstance(given, (tuple, list)):
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
    else:
        held = {name: given[name] for name in given.keys()}  # noqa: SIM118 - a model's output iterates over its values
        held = {name: one for name, one in held.items() if isinstance(one, torch.Tensor)}
        tensors = [one for name, one in held.items() if name.endswith("logits")] or list(held.values())
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def example_inputs(model: nn.Module, example: Example | None) -> Inputs:
    """The example as it is given, or tokens and a mask for a model with the config of a language model.

    Raises:
        UsageError: the example is no tuple or dict of tensors, or is missing for another model.
    """
    if example is not None:
        inputs: Inputs = dict(example) if isinstance(example, Mapping) else example
        values = inputs.values() if isinstance(inputs, dict) else inputs
        if (
            not isinstance(inputs, (dict, tuple))
            or not inputs
            or not all(isinstance(one, torch.Tensor) for one in values)
        ):
            raise UsageError(
                f"example is a {type(example).__name__}: expected a tuple of tensors, or a dict of tensors by name",
                argument="example",
            )
        return inputs
    config = getattr(model, "config", None)
    text: Any = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    if not isinstance(size, int) or not callable(getattr(model, "get_input_embeddings", None)):
        raise UsageError(
            f"example: {type(model).__name__} has no config that says which inputs it takes",
            help="give example=(tensor, ...) or example={name: tensor}",
            argument="example",
        )
    room = min(_count(text, key) for key in ("max_position_embeddings", "n_positions"))
    decoder = "decoder_input_ids" in inspect.signature(type(model).forward).parameters
    return _tokens(size, 3, min(LENGTH, room - decoder), decoder=decoder)


def _count(config: Any, key: str) -> int:
    value = getattr(config, key, None)
    return value if isinstance(value, int) and value > 0 else 1 << 30


def _tokens(size: int, batch: int, length: int, *, decoder: bool) -> dict[str, torch.Tensor]:
    """Token ids (B, T) drawn at random, a mask that hides the last token of the first row, and a target (B, T + 1)."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, -1] = 0
    inputs = {"input_ids": torch.randint(size, (batch, length), generator=generator), "attention_mask": mask}
    if decoder:
        inputs["decoder_input_ids"] = torch.randint(size, (batch, length + 1), generator=generator)
    return inputs


def resized(inputs: Inputs) -> Inputs | None:
    """The inputs with one row less, and one token less: to show that neither size is fixed; `None` if they have none.

    Only inputs that are all integers (B, T) with B and T above 2 are resized.
    """
    values = inputs.values() if isinstance(inputs, dict) else inputs
    if any(one.ndim != 2 or one.is_floating_point() or min(one.shape) < 3 for one in values):
        return None
    if isinstance(inputs, dict):
        return {name: one[:-1, 1:].contiguous() for name, one in inputs.items()}
    return tuple(one[:-1, 1:].contiguous() for one in inputs)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode without gradients; its modules' own modes come back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
