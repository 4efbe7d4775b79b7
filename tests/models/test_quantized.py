"""`quantize_tied` of Bowline's own models: the logits of the matrix that it left, stored once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from bowline.nn import quantize_tied
from tests.models.sizes import CLASSES, configs

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
CONFIGS = configs(11, 8, 1)


@pytest.mark.parametrize("family", CLASSES)
def test_its_logits_are_those_of_the_rounded_matrix(family: str) -> None:
    torch.manual_seed(0)
    model: Any = CLASSES[family](CONFIGS[family]).eval()
    more = {"labels": IDS} if family == "t5" else {}
    plain = copy.deepcopy(model)
    (source,) = {tie.source for tie in quantize_tied(model)}
    with torch.no_grad():
        plain.get_parameter(source).copy_(model.get_submodule(source.removesuffix(".weight")).weight)
    torch.testing.assert_close(model(IDS, **more).logits, plain(IDS, **more).logits)
    assert not [name for name in model.state_dict() if name.endswith(("lm_head.weight", "decoder.weight"))]
