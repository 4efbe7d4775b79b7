"""Beside transformers' own draw: the same scales, tensor by tensor, within the error of the sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bowline.nn.init import Drawn, Fused, find_roles, init_weights
from bowline.recipes import RECIPES
from tests.nn.init.statistics import LIMIT, z_of_std
from tests.nn.init.tiny import transformers_model

pytestmark = pytest.mark.usefixtures("quiet_transformers")

# larger than what the roles are shown on: an error of 1 in a role's std would pass unseen in a handful of numbers
WIDE: dict[str, Any] = {"vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 96}
T5_WIDE: dict[str, Any] = {"vocab_size": 300, "d_model": 48, "d_kv": 8, "d_ff": 96, "num_layers": 2}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("bert", "transformers-bert", WIDE),
    "gpt2": ("gpt2", "transformers-gpt2", {"vocab_size": 300, "n_embd": 48, "n_layer": 3}),
    "gpt2-untied": ("gpt2-untied", "transformers-gpt2", {"vocab_size": 300, "n_embd": 48, "n_layer": 3}),
    "t5": ("t5", "transformers-t5", T5_WIDE),
    "t5-forced-tie": ("t5-gated", "transformers-t5-forced-tie", T5_WIDE),
    "llama": ("llama", "transformers-llama", WIDE),
    "llama-tied": ("llama-tied", "transformers-llama", WIDE),
    "gemma": ("gemma", "transformers-gemma", WIDE),
}
# 8 models of about 30 random tensors each, drawn twice: a right test is beyond LIMIT once in 3000 runs with new seeds


@pytest.mark.parametrize("case", CASES)
def test_scales_are_those_of_transformers_own_draw(case: str) -> None:
    name, recipe, sizes = CASES[case]
    torch.manual_seed(0)
    theirs, ours = transformers_model(name, **sizes), transformers_model(name, **sizes)
    report = init_weights(ours, recipe, seed=0)
    roles = find_roles(theirs)
    stds: dict[str, list[Drawn]] = {}
    for one in report.drawn:
        stds.setdefault(one.name, []).append(one)
    assert list(roles) == list(stds)
    for name, parts in stds.items():
        reference, drawn = theirs.get_parameter(name).detach(), ours.get_parameter(name).detach()
        role = roles[name]
        axis = 1 if "c_attn" in name else 0
        pairs = [(reference, drawn)]
        if isinstance(role, Fused):
            both = (role.blocks(tensor, axis) for tensor in (reference, drawn))
            pairs = [(one[1], other[1]) for one, other in zip(*both, strict=True)]
        for (reference, drawn), one in zip(pairs, parts, strict=True):
            if not one.std:  # norms and biases, whatever stands for a gain of 1 in them
                assert torch.equal(reference, drawn), name
                continue
            kept = reference.flatten(1).any(1)  # but for padding, which is zero in both
            assert torch.equal(kept, drawn.flatten(1).any(1)), name
            assert abs(z_of_std(reference[kept], one.std)) < LIMIT, (name, float(reference.std()), one.std)
            assert abs(z_of_std(drawn[kept], one.std)) < LIMIT, (name, float(drawn.std()), one.std)


def test_padding_is_zero_where_transformers_zeroes_it() -> None:
    model = transformers_model("roberta")
    assert RECIPES["transformers-bert"].zero_padding
    init_weights(model, "transformers-bert", seed=0)
    reference = transformers_model("roberta").state_dict()
    for name, tensor in model.state_dict().items():
        if name.endswith("embeddings.weight"):
            assert torch.equal(tensor.any(1), reference[name].any(1)), name
