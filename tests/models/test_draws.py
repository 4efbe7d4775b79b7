"""A new model is drawn as the usual recipe of its family says: the two are written apart, and say the same."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

from bowline.models import BertForPreTraining
from bowline.nn import init_weights
from bowline.recipes import Role, constant, usual
from tests.models import sizes

CLASSES = {**sizes.CLASSES, "bert": BertForPreTraining}  # which has more to draw
CONFIGS = sizes.configs(300, 64, 2)


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("tied", [True, False])
def test_each_tensor_has_the_mean_and_std_that_the_recipe_gives_its_role(family: str, tied: bool) -> None:
    """Within five standard errors each: of 300 tensors one is further off by chance in 6000 runs."""
    cls, config = CLASSES[family], CONFIGS[family]
    torch.manual_seed(0)
    model = cls(config.updated(tie_word_embeddings=tied))
    recipe = usual(family)
    if family == "lstm":  # a head's bias that begins at 0, as in AWD-LSTM
        recipe = replace(recipe, roles={**recipe.roles, Role.HEAD_BIAS: constant(0.0)})
    report = init_weights(copy.deepcopy(model), recipe, seed=1, scales="model")
    parameters = dict(model.named_parameters())
    assert {drawn.name for drawn in report.drawn} == set(parameters)
    for drawn in report.drawn:
        values = parameters[drawn.name].detach().double()
        padding = recipe.zero_padding and drawn.role in (Role.INPUT_EMBEDDING, Role.HEAD)
        values = values[1:] if padding else values
        count = values.numel()
        if drawn.std == 0:
            assert (values == drawn.mean).all(), drawn.name
        else:
            assert abs(float(values.mean()) - drawn.mean) < 5 * drawn.std / math.sqrt(count), drawn.name
            assert abs(float(values.std()) / drawn.std - 1) < 5 / math.sqrt(2 * count), drawn.name
