"""A run whose tie breaks half-way: without the guard it ends as if nothing had happened, with it, it stops there."""

from __future__ import annotations

import re
import timeit
from collections.abc import Callable
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import SGD, AdamW

from bowline.errors import TieError, UsageError
from bowline.nn import tie_weights, untie_weights
from bowline.nn.guards.tie_guard import TieGuard
from bowline.tie import Tie
from tests.nn.guards.guarded import BREAKS_AT, ROWS, TIE, WIDTH, Tiny, backward, is_tied, swap_head


@pytest.fixture
def model() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


# --- what is guarded ------------------------------------------------------------------------------------------------


def test_declared_and_shared_ties_are_guarded_unless_ties_are_named(model: Tiny) -> None:
    model.transformer["ln_g"] = nn.LayerNorm(WIDTH)
    cast(nn.LayerNorm, model.transformer["ln_g"]).bias = cast(nn.LayerNorm, model.transformer["ln_f"]).bias
    shared = Tie("transformer.ln_g.bias", "transformer.ln_f.bias")
    assert set(TieGuard(model).ties) == {TIE, shared}
    assert TieGuard(model, [shared]).ties == (shared,)
    assert TieGuard(model, {shared.target: shared.source}).ties == (shared,)


def test_a_declared_tie_that_does_not_hold_at_the_start_is_refused(model: Tiny) -> None:
    swap_head(model)
    with pytest.raises(TieError, match=r"lm_head\.weight <- transformer\.wte\.weight DIVERGED: 64 of 64 rows"):
        TieGuard(model)


def test_an_alias_at_the_start_is_refused(model: Tiny) -> None:
    alias(model)
    with pytest.raises(TieError, match="ALIAS"):
        TieGuard(model)


def test_an_optimizer_made_before_tying_is_refused(model: Tiny) -> None:
    swap_head(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    model.lm_head.weight = model.wte.weight
    with pytest.raises(TieError, match=r"group 0 of the optimizer holds a .* the model no longer has"):
        TieGuard(model, optimizer=optimizer)


def test_nothing_to_guard_is_refused(model: Tiny) -> None:
    with pytest.raises(TieError, match="Linear declares no ties and shares no parameters, so there is nothing"):
        TieGuard(nn.Linear(2, 2))
    with pytest.raises(TieError, match="no ties were given, so there is nothing to guard"):
        TieGuard(model, [])


@pytest.mark.parametrize("every", [0, -1])
def test_every_no_step_is_refused(model: Tiny, every: int) -> None:
    with pytest.raises(UsageError, match=f"every={every}"):
        TieGuard(model, every=every)


# --- what breaks a tie ----------------------------------------------------------------------------------------------


def load_by_assignment(model: Tiny) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def replace_embedding(model: Tiny) -> None:
    model.transformer["wte"] = nn.Embedding(ROWS, WIDTH)


def resize_embedding_alone(model: Tiny) -> None:
    model.wte.weight = nn.Parameter(torch.zeros(ROWS + 1, WIDTH))


def alias(model: Tiny) -> None:
    model.lm_head.weight = nn.Parameter(model.wte.weight.detach())


def clone(model: Tiny) -> None:
    model.lm_head.weight = nn.Parameter(model.wte.weight.detach().clone())


def spectral_norm(model: Tiny) -> None:
    parametrizations.spectral_norm(model.lm_head)


def remove_head(model: Tiny) -> None:
    del model.lm_head


def remove_both(model: Tiny) -> None:
    del model.lm_head, model.transformer


@pytest.mark.parametrize(
    ("harm", "seen"),
    [
        (swap_head, "DIVERGED: 64 of 64 rows differ"),
        (replace_embedding, "DIVERGED: 64 of 64 rows differ"),
        (resize_embedding_alone, "INCOMPATIBLE"),
        (load_by_assignment, "EQUAL"),
        (clone, "EQUAL"),
        (alias, "ALIAS"),
        (lambda model: model.to("meta"), "EQUAL"),
        (spectral_norm, "TARGET_MISSING; error: lm_head.weight: is computed by a parametrization"),
        (remove_head, "TARGET_MISSING"),
        (remove_both, "BOTH_MISSING"),
    ],
)
def test_whatever_breaks_a_tie_is_seen_and_said(model: Tiny, harm: Callable[[Tiny], None], seen: str) -> None:
    guard = TieGuard(model)
    guard.check()
    harm(model)
    with pytest.raises(TieError, match=re.escape(f"{TIE} {seen}")):
        guard.check()


def test_a_parametrized_end_is_not_computed_by_a_check(model: Tiny) -> None:
    guard = TieGuard(model)
    spectral_norm(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(TieError):
        guard.check()
    assert before and all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_training_casts_and_a_plain_load_break_nothing(model: Tiny) -> None:
    guard = TieGuard(model)
    backward(model)
    SGD(model.parameters(), lr=0.1).step()
    guard.check()
    model.double()
    guard.check()
    model.load_state_dict(model.state_dict())
    guard.check()


def test_only_the_broken_ones_of_several_ties_are_named() -> None:
    tied = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("a", "b", "c")})
    tied["b"].weight = tied["c"].weight = tied["a"].weight
    guard = TieGuard(tied)
    tied["b"] = cast(nn.Module, torch.compile(tied["b"], backend="eager"))
    tied["c"] = nn.Linear(2, 2)
    with pytest.raises(TieError) as caught:
        guard.check()
    assert "c.weight <- a.weight" in caught.value.message
    assert "b.weight" not in caught.value.message


def test_the_way_out_is_to_tie_again(model: Tiny) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    guard = TieGuard(model, optimizer=optimizer)
    swap_head(model)
    reason = r"the optimizer does not hold lm_head\.weight, so it does not train that parameter"
    with pytest.raises(TieError, match=reason) as caught:
        guard.check()
    assert caught.value.help is not None and "tie_weights(model, guard.ties, optimizer=optimizer" in caught.value.help
    tie_weights(model, guard.ties, optimizer=optimizer, on_conflict="source")
    guard.check()


def test_or_the_way_out_is_to_untie_and_to_let_the_guard_go(model: Tiny) -> None:
    guard = TieGuard(model)
    untie_weights(model)
    with pytest.raises(TieError, match="EQUAL") as caught:
        guard.check()
    assert caught.value.help is not None and "untie_weights(model)" in caught.value.help


def test_a_check_looks_at_identity_and_costs_under_20_microseconds_with_300_modules() -> None:
    large = nn.ModuleDict({"model": Tiny()})
    cast(Tiny, large["model"]).transformer["h"] = nn.ModuleList(nn.Linear(2, 2) for _ in range(300))
    guard = TieGuard(large)
    assert len(guard.ties) == 1
    assert min(timeit.repeat(guard.check, number=200, repeat=20)) / 200 < 20e-6


# --- steps ----------------------------------------------------------------------------------------------------------


def test_only_each_nth_step_checks(model: Tiny) -> None:
    guard = TieGuard(model, every=3)
    swap_head(model)
    guard.step()
    guard.step()
    with pytest.raises(TieError, match=r"^after 3 guarded steps, "):
        guard.step()


def train(model: Tiny, optimizer: torch.optim.Optimizer) -> None:
    """A plain loop of six steps, in which something swaps the head at the third."""
    for step in range(1, 7):
        backward(model)
        if step == BREAKS_AT:
            swap_head(model)
        optimizer.step()
        optimizer.zero_grad()


def test_without_a_guard_a_plain_loop_ends_silently_untied(model: Tiny) -> None:
    train(model, SGD(model.parameters(), lr=0.1))
    assert not is_tied(model)


def test_attached_to_the_optimizer_a_guard_stops_a_plain_loop_at_the_step(model: Tiny) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    guard = TieGuard(model)
    guard.attach(optimizer)
    with pytest.raises(TieError, match=f"^after 3 guarded steps, .*{re.escape(str(TIE))} DIVERGED"):
        train(model, optimizer)
    assert guard.steps == BREAKS_AT


def test_a_guard_changes_nothing_about_a_run_whose_tie_holds() -> None:
    weights = []
    for guarded in (False, True):
        torch.manual_seed(0)
        model = Tiny()
        optimizer = AdamW(model.parameters())
        if guarded:
            TieGuard(model, optimizer=optimizer).attach(optimizer)
        for _ in range(4):
            backward(model)
            optimizer.step()
        weights.append(model.wte.weight.detach().clone())
    assert torch.equal(*weights)


def test_a_handle_that_is_removed_or_left_guards_no_more(model: Tiny) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    guard = TieGuard(model)
    with guard.attach(optimizer):
        optimizer.step()
    swap_head(model)
    optimizer.step()
    handle = guard.attach(optimizer)
    with pytest.raises(TieError):
        optimizer.step()
    handle.remove()
    optimizer.step()


# --- wrapped later --------------------------------------------------------------------------------------------------


def test_torch_compile_after_the_guard_changes_nothing_for_it(model: Tiny) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    TieGuard(model).attach(optimizer)
    compiled: Any = torch.compile(model, backend="eager")
    backward(compiled)
    optimizer.step()
    compiled._orig_mod.lm_head = nn.Linear(WIDTH, ROWS, bias=False)
    backward(compiled)
    with pytest.raises(TieError, match=r"^after 2 guarded steps"):
        optimizer.step()


def test_an_end_that_is_compiled_alone_is_still_tied(model: Tiny) -> None:
    guard = TieGuard(model)
    model.lm_head = torch.compile(model.lm_head, backend="eager")  # type: ignore[assignment]
    model.transformer = torch.compile(model.transformer, backend="eager")  # type: ignore[assignment]
    guard.check()
    model.lm_head.weight = nn.Parameter(torch.zeros(ROWS, WIDTH))
    with pytest.raises(TieError, match=r"the nearest are lm_head\._orig_mod\.weight"):
        guard.check()


def test_a_guard_of_a_wrapper_names_what_hangs_in_it(model: Tiny) -> None:
    guard = TieGuard(nn.Sequential(model))
    swap_head(model)
    with pytest.raises(TieError, match=r"0\.lm_head\.weight <- 0\.transformer\.wte\.weight DIVERGED"):
        guard.check()


@pytest.mark.usefixtures("one_process")
def test_distributed_data_parallel_after_the_guard_changes_nothing_for_it(model: Tiny) -> None:
    guard = TieGuard(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = SGD(wrapped.parameters(), lr=0.1)
    guard.attach(optimizer)
    backward(wrapped)
    optimizer.step()
    swap_head(model)
    with pytest.raises(TieError, match=r"^after 2 guarded steps"):
        optimizer.step()


def test_the_optimizer_that_accelerate_wraps_runs_the_hook(model: Tiny) -> None:
    accelerate = pytest.importorskip("accelerate")
    guard = TieGuard(model)
    prepared, optimizer = accelerate.Accelerator(cpu=True).prepare(model, SGD(model.parameters(), lr=0.1))
    guard.attach(optimizer)
    backward(prepared)
    optimizer.step()
    assert guard.steps == 1
    swap_head(model)
    with pytest.raises(TieError, match=r"^after 2 guarded steps"):
        optimizer.step()
