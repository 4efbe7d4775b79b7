"""The timing that chooses the library for products, on machines with other work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from bowline.functional.loss import resources
from bowline.functional.loss.chunks import cpu_matmul, matmul_choice
from bowline.functional.loss.chunks.cpu_matmul import LIBRARIES
from bowline.functional.loss.chunks.matmul_choice import clearly_faster, in_turns
from bowline.functional.loss.resource_limits import Resources, current


class Machine:
    """Calls that take given seconds, times the load of the machine at that moment."""

    def __init__(self, slowness: Callable[[float], float]) -> None:
        self.now, self.slowness = 0.0, slowness

    def clock(self) -> float:
        return self.now

    def call(self, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.now += seconds * self.slowness(self.now)

        return run

    def faster(self, rival: float, usual: float) -> bool:
        times = in_turns({"mm": self.call(usual), "onednn": self.call(rival)}, self.clock)
        return clearly_faster(times["onednn"], times["mm"])


MACHINES: dict[str, Callable[[float], float]] = {
    "quiet": lambda _: 1.0,
    "slow at first": lambda now: 2.0 if now < 8 else 1.0,
    "slow at last": lambda now: 1.0 if now < 9 else 2.0,
    "slow once": lambda now: 5.0 if 7 < now < 8 else 1.0,
    "slower and slower": lambda now: 1.0 + now / 40,
}


@pytest.mark.parametrize("name", MACHINES)
def test_whatever_else_the_machine_does_the_faster_is_chosen_and_the_equal_is_not(name: str) -> None:
    machine = MACHINES[name]
    assert Machine(machine).faster(0.7, 1.0)
    assert not Machine(machine).faster(0.97, 1.0)
    assert not Machine(machine).faster(1.0, 1.0)
    assert not Machine(machine).faster(1.2, 1.0)


@pytest.mark.parametrize(
    ("times", "expected"), [([7, 7, 7], True), ([5, 11, 12], False), ([9.4, 3, 3], True), ([9.6, 9.6, 9.6], False)]
)
def test_one_lucky_time_is_not_enough(times: Sequence[float], expected: bool) -> None:
    assert clearly_faster(times, [10, 10, 11]) is expected


def test_an_operator_that_is_gone_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*args: Any) -> torch.Tensor:
        raise AttributeError("no _linear_pointwise")

    monkeypatch.setattr(cpu_matmul, "_onednn", gone)
    monkeypatch.setattr(matmul_choice, "WORTH_TIMING", 0)
    matmul_choice._timed.cache_clear()
    assert matmul_choice.products_for(torch.zeros(2, 4), torch.zeros(9, 4), Resources()) is LIBRARIES["mm"]
    matmul_choice._timed.cache_clear()


@pytest.mark.parametrize(("dtype", "library"), [(torch.float32, "onednn"), (torch.float16, "float32")])
def test_where_bits_have_to_be_the_same_nothing_hangs_on_a_measurement(
    dtype: torch.dtype, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul_choice, "WORTH_TIMING", 0)
    monkeypatch.setattr(matmul_choice, "emulated", lambda _: False)
    monkeypatch.setattr(matmul_choice, "_timed", lambda *_: library)
    tensors = torch.zeros(2, 4, dtype=dtype), torch.zeros(9, 4, dtype=dtype)
    assert matmul_choice.products_for(*tensors, Resources()) is LIBRARIES[library]
    with resources(onednn=False) as allowed:
        assert matmul_choice.products_for(*tensors, allowed) is LIBRARIES["mm"]
    assert current() == Resources()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert matmul_choice.products_for(*tensors, Resources()) is LIBRARIES["mm"]


def test_float64_is_never_narrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_choice, "WORTH_TIMING", 0)
    monkeypatch.setattr(matmul_choice, "_timed", lambda *_: "float32")
    assert (
        matmul_choice.products_for(torch.zeros(2, 4).double(), torch.zeros(9, 4).double(), Resources())
        is LIBRARIES["mm"]
    )


def test_small_products_are_not_worth_a_measurement() -> None:
    matmul_choice._timed.cache_clear()
    assert matmul_choice.products_for(torch.zeros(64, 64), torch.zeros(1000, 64), Resources()) is LIBRARIES["mm"]
    assert matmul_choice._timed.cache_info().currsize == 0


@pytest.mark.parametrize(("emulated", "expected"), [(True, "float32"), (False, "mm")])
def test_half_precision_is_widened_where_the_processor_has_no_such_products(
    emulated: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul_choice, "emulated", lambda _: emulated)
    found = matmul_choice.products_for(torch.zeros(2, 4).bfloat16(), torch.zeros(9, 4).bfloat16(), Resources())
    assert found is LIBRARIES[expected]
