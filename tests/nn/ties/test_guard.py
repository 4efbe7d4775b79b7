"""A run whose tie breaks half-way: without the guard it ends as if nothing had happened, with it, it stops there."""

from __future__ import annotations

import re
import sys
import timeit
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations
from torch.optim import SGD, AdamW

from bowline.errors import TieError, UsageError
from bowline.nn import tie_weights, untie_weights
from bowline.nn.ties.guard import TieGuard
from bowline.tie import Tie

ROWS, WIDTH = 64, 8
BREAKS_AT = 3
TIE = Tie("lm_head.weight", "transformer.wte.weight")


class Tiny(nn.Module):
    """The names of GPT-2, and nothing between its two ends."""

    ties = (TIE,)

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(ROWS, WIDTH), "ln_f": nn.LayerNorm(WIDTH)})
        self.lm_head = nn.Linear(WIDTH, ROWS, bias=False)
        self.lm_head.weight = self.wte.weight

    @property
    def wte(self) -> nn.Embedding:
        return cast(nn.Embedding, self.transformer["wte"])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.lm_head(self.transformer["ln_f"](self.wte(tokens))))


@pytest.fixture
def model() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


def tokens() -> torch.Tensor:
    return torch.randint(ROWS, (2, 6), generator=torch.Generator().manual_seed(0))


def backward(model: Callable[..., torch.Tensor]) -> None:
    torch.autograd.backward(cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten()))


def is_tied(model: Any) -> bool:
    return model.lm_head.weight is model.get_submodule("transformer.wte").weight


def swap_head(model: Any) -> None:
    """What a user writes who wants to change the head, and does not think of the tie."""
    model.lm_head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False)


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
    with pytest.raises(TieError, match="Linear: nothing is tied"):
        TieGuard(nn.Linear(2, 2))
    with pytest.raises(TieError, match="Tiny: nothing is tied"):
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
    with pytest.raises(TieError, match=r"the optimizer does not hold lm_head\.weight: it will not train") as caught:
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


# --- transformers' Trainer ------------------------------------------------------------------------------------------


def gpt2() -> Any:
    pytest.importorskip("transformers")
    from tools.tiny import build, load_class

    return build(load_class("GPT2LMHeadModel")).train()


def breaks_the_tie() -> Any:
    transformers = pytest.importorskip("transformers")

    class BreaksTheTie(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            if state.global_step == BREAKS_AT:
                swap_head(model)

    return BreaksTheTie()


def run_trainer(model: Any, directory: Path, *callbacks: Any, **more: Any) -> Any:
    """Six steps on the CPU; returns the trainer."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    data = [{"input_ids": row, "labels": row} for row in tokens().repeat(12, 1)]
    arguments = transformers.TrainingArguments(
        output_dir=str(directory),
        max_steps=6,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **{"save_strategy": "no", **more},
    )
    trainer = transformers.Trainer(
        **({"model_init": model} if isinstance(model, types.FunctionType) else {"model": model}),
        args=arguments,
        train_dataset=data,
        callbacks=list(callbacks),
    )
    trainer.train()
    return trainer


def test_without_a_guard_transformers_trainer_ends_silently_untied(tmp_path: Path) -> None:
    model = gpt2()
    trainer = run_trainer(model, tmp_path, breaks_the_tie())
    assert trainer.state.global_step == 6
    assert model.config.tie_word_embeddings and not is_tied(model)


def test_with_a_guard_transformers_trainer_stops_at_the_step(tmp_path: Path) -> None:
    model = gpt2()
    guard = TieGuard(model)
    with pytest.raises(TieError, match=f"^after 3 guarded steps, .*{re.escape(str(TIE))} DIVERGED: 1031 of 1031 rows"):
        run_trainer(model, tmp_path, breaks_the_tie(), guard.trainer_callback())


def test_a_guard_lets_transformers_trainer_end_when_the_tie_holds(tmp_path: Path) -> None:
    model = gpt2()
    guard = TieGuard(model)
    assert run_trainer(model, tmp_path, guard.trainer_callback()).state.global_step == guard.steps == 6
    assert is_tied(model)


def test_a_tie_that_was_broken_before_the_trainer_began_stops_it_at_once(tmp_path: Path) -> None:
    model = gpt2()
    guard = TieGuard(model)
    swap_head(model)
    with pytest.raises(TieError, match=r"^1 of 1 ties does not hold"):
        run_trainer(model, tmp_path, guard.trainer_callback())


@pytest.mark.parametrize(
    ("saves", "steps"), [({"save_strategy": "steps", "save_steps": 4}, 4), ({}, 6)], ids=["save", "end"]
)
def test_between_the_checks_of_steps_saves_and_the_end_are_checked(
    tmp_path: Path, saves: dict[str, Any], steps: int
) -> None:
    model = gpt2()
    guard = TieGuard(model, every=100)
    with pytest.raises(TieError, match=f"^after {steps} guarded steps"):
        run_trainer(model, tmp_path, breaks_the_tie(), guard.trainer_callback(), **saves)


def test_a_trainer_that_trains_another_model_is_refused(tmp_path: Path) -> None:
    guard = TieGuard(gpt2())
    with pytest.raises(UsageError, match="shares no module with the guard's GPT2LMHeadModel"):
        run_trainer(gpt2, tmp_path, guard.trainer_callback())


def test_without_transformers_its_callback_says_what_to_install(model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="pip install transformers"):
        TieGuard(model).trainer_callback()


# --- Lightning's Trainer --------------------------------------------------------------------------------------------

LIGHTNING_WARNS = pytest.mark.filterwarnings(
    "ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning",  # how it walks a batch
)


def lit(model: Tiny, *, breaks: bool) -> Any:
    """`model` as a LightningModule that swaps the head after batch 3, if it `breaks`."""
    lightning = pytest.importorskip("pytorch_lightning")

    class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: torch.Tensor, at: int) -> torch.Tensor:
            if breaks and at + 1 == BREAKS_AT:
                swap_head(self.model)
            return cross_entropy(self.model(batch).flatten(0, 1), batch.flatten())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return SGD(self.parameters(), lr=0.1)

    return Lit()


def fit(module: Any, *callbacks: Any, **more: Any) -> Any:
    """Six batches on the CPU; returns the trainer."""
    lightning = pytest.importorskip("pytorch_lightning")
    settings = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False, **more}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, callbacks=list(callbacks), **settings
    )
    rows: Any = tokens().repeat(6, 1)
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2))
    return trainer


@LIGHTNING_WARNS
def test_without_a_guard_lightning_ends_silently_untied(model: Tiny) -> None:
    assert fit(lit(model, breaks=True)).global_step == 6
    assert not is_tied(model)


@LIGHTNING_WARNS
def test_with_a_guard_lightning_stops_at_the_batch(model: Tiny) -> None:
    guard = TieGuard(model)
    with pytest.raises(TieError, match=f"^after 3 guarded steps, .*{re.escape(str(TIE))} DIVERGED: 64 of 64 rows"):
        fit(lit(model, breaks=True), guard.lightning_callback())


@LIGHTNING_WARNS
def test_a_guard_lets_lightning_end_when_the_tie_holds(model: Tiny) -> None:
    guard = TieGuard(model)
    assert fit(lit(model, breaks=False), guard.lightning_callback()).global_step == guard.steps == 6
    assert is_tied(model)


@LIGHTNING_WARNS
def test_a_guard_of_the_lightning_module_guards_the_model_in_it(model: Tiny) -> None:
    module = lit(model, breaks=True)
    with pytest.raises(TieError, match=r"model\.lm_head\.weight <- model\.transformer\.wte\.weight DIVERGED"):
        fit(module, TieGuard(module).lightning_callback())


@LIGHTNING_WARNS
def test_between_the_checks_of_steps_the_end_of_lightning_is_checked(model: Tiny) -> None:
    with pytest.raises(TieError, match=r"^after 6 guarded steps"):
        fit(lit(model, breaks=True), TieGuard(model, every=100).lightning_callback())


@LIGHTNING_WARNS
def test_lightning_writes_no_checkpoint_of_a_broken_tie(model: Tiny, tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning")
    saves = lightning.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=5)
    with pytest.raises(TieError, match=r"^after 5 guarded steps"):
        guard = TieGuard(model, every=100).lightning_callback()
        fit(lit(model, breaks=True), guard, saves, enable_checkpointing=True)
    assert not list(tmp_path.iterdir())


@LIGHTNING_WARNS
def test_lightning_that_trains_another_model_is_refused(model: Tiny) -> None:
    with pytest.raises(UsageError, match="a Lit that shares no module with the guard's Tiny"):
        fit(lit(Tiny(), breaks=False), TieGuard(model).lightning_callback())


def test_of_two_lightnings_the_one_in_use_gives_the_callback(
    model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "lightning"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "pytorch.py").write_text("class Callback: ...")
    monkeypatch.syspath_prepend(tmp_path)
    in_use = pytest.importorskip("pytorch_lightning")
    assert isinstance(TieGuard(model).lightning_callback(), in_use.Callback)

    other = types.ModuleType("lightning.pytorch")
    other.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning.pytorch", other)
    monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    monkeypatch.delitem(sys.modules, "pytorch_lightning")
    assert isinstance(TieGuard(model).lightning_callback(), other.Callback)


def test_without_lightning_its_callback_says_what_to_install(model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match="pip install lightning"):
        TieGuard(model).lightning_callback()
