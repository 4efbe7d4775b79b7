"""The activation functions, by the names that configs give them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.errors import ConfigError

__all__ = ["ACTIVATIONS", "activation"]

gelu_tanh = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,  # transformers writes the tanh form in Python; this is the same function, fused
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "mish": F.mish,
    "linear": lambda x: x,
}


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation function that configs call `name`.

    Raises:
        ConfigError: no function has that name.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ConfigError(f"activation {name!r:.60}: expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
