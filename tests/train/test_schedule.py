"""Warm-up and cosine, step by step."""

from __future__ import annotations

import math

import pytest

from bowline.errors import UsageError
from bowline.train import TrainerSettings
from bowline.train.loop.learning_rate import learning_rate_at


def rates(**options: object) -> list[float]:
    settings = TrainerSettings(**{"steps": 100, "learning_rate": 2.0, "warmup_steps": 10, **options})  # type: ignore[arg-type]
    return [learning_rate_at(step, settings) for step in range(settings.steps)]


def test_the_warm_up_is_a_line_that_does_not_begin_at_zero() -> None:
    assert rates()[:11] == pytest.approx([2.0 * (step + 1) / 11 for step in range(11)])


def test_the_last_step_has_the_least_share() -> None:
    assert rates()[-1] == pytest.approx(0.2)
    assert rates(min_learning_rate=0.0)[-1] == pytest.approx(0.0, abs=1e-12)


def test_between_them_it_is_the_cosine_of_torchs_scheduler() -> None:
    import torch

    group = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(group, T_max=89, eta_min=0.2)
    for rate in rates()[10:]:
        assert rate == pytest.approx(theirs.get_last_lr()[0])
        group.step()
        theirs.step()


def test_without_a_warm_up_the_first_step_has_the_highest_rate() -> None:
    assert rates(warmup_steps=0)[0] == 2.0


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 5), (2, 2), (3, 2)])
def test_a_warm_up_as_long_as_the_run_is_still_a_schedule(steps: int, warmup: int) -> None:
    assert all(0 < rate <= 2.0 and math.isfinite(rate) for rate in rates(steps=steps, warmup_steps=warmup))


def test_the_warm_up_is_a_tenth_of_the_run_and_at_most_a_hundred_steps_unless_it_is_given() -> None:
    assert [TrainerSettings(steps=steps).warmup for steps in (5, 200, 5000)] == [0, 20, 100]
    assert TrainerSettings(steps=5, warmup_steps=3).warmup == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0: expected a whole number from 1"),
        ({"steps": True}, "steps=True: expected a whole number"),
        ({"steps": 1, "learning_rate": 0}, "learning_rate=0: expected a number above 0"),
        ({"steps": 1, "learning_rate": math.nan}, "learning_rate=nan: expected a number above 0"),
        ({"steps": 1, "learning_rate": 10**400}, "learning_rate=1000.*: expected a number above 0"),
        ({"steps": 1, "min_learning_rate": 1.5}, "min_learning_rate=1.5: expected a number from 0 to 1"),
        ({"steps": 1, "betas": (0.9, 1.0)}, "betas=.*: expected two numbers, each from 0 to below 1"),
        ({"steps": 1, "clip": -1}, "clip=-1: expected a number from 0"),
        ({"steps": 1, "bf16": "yes"}, "bf16='yes': expected True or False"),
        ({"steps": 1, "warmup_steps": -1}, "warmup_steps=-1: expected a whole number from 0"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainerSettings(**options)  # type: ignore[arg-type]


def test_settings_are_the_same_after_json() -> None:
    import json

    settings = TrainerSettings(steps=7, betas=(0.8, 0.9), untie_at_step=3)
    assert TrainerSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    with pytest.raises(UsageError, match="stepps: is not a setting of a training run"):
        TrainerSettings.from_dict({"steps": 3, "stepps": 4})
