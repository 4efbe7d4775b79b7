"""The guard in the training loops of transformers and of Lightning."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from bowline.errors import TieError, UsageError
from bowline.nn.guards.tie_guard import TieGuard
from tests.nn.guards.guarded import BREAKS_AT, TIE, Tiny, is_tied, swap_head, tokens


@pytest.fixture
def model() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


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


def test_the_guard_itself_is_a_callback_of_transformers_trainer(tmp_path: Path) -> None:
    model = gpt2()
    guard = TieGuard(model)
    run_trainer(model, tmp_path, guard, save_strategy="steps", save_steps=4, logging_steps=1)
    assert guard.steps == 6 and is_tied(model)
    with pytest.raises(TieError, match=f"^after 9 guarded steps, .*{re.escape(str(TIE))} DIVERGED"):
        run_trainer(model, tmp_path, breaks_the_tie(), guard)


def test_the_guard_has_no_methods_that_no_trainer_calls(model: Tiny) -> None:
    guard = TieGuard(model)
    assert guard.on_an_event_of_a_later_version(1, two=2) is None
    assert not hasattr(guard, "steps_on")


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
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_the_guard_itself_is_a_callback_of_lightning(model: Tiny, tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning")
    guards = [TieGuard(model), TieGuard(model, every=2)]
    saves = lightning.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=6)
    fit(lit(model, breaks=False), *guards, saves, enable_checkpointing=True)
    assert [guard.steps for guard in guards] == [6, 6] and is_tied(model)
    (saved,) = tmp_path.iterdir()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    again = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=2, logger=False, callbacks=guards, **quiet)
    rows: Any = tokens().repeat(6, 1)
    again.fit(lit(model, breaks=False), torch.utils.data.DataLoader(rows, batch_size=2), ckpt_path=saved)
    with pytest.raises(TieError, match=f"{re.escape(str(TIE))} DIVERGED: 64 of 64 rows"):
        fit(lit(model, breaks=True), TieGuard(model))


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
