"""The loop: held against a plain one, and what it says of itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from bowline.errors import TrainingError, UsageError
from bowline.functional.kernels import half_precision_emulation
from bowline.functional.loss import linear_cross_entropy
from bowline.functional.loss.chunks import matmul_choice
from bowline.train import Trainer, TrainerSettings
from bowline.train.loop.learning_rate import learning_rate_at
from tests.functional.multiplied import Multiplied
from tests.train.runs import SIZE, Counting, run, same, settings, tiny, without_times

STILL: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def plain_losses(model: Any, chosen: TrainerSettings) -> list[float]:
    """Another loop: torch's AdamW as it comes, float64, the loss from the logits, one batch with all rows of a step."""
    model.double().train()
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": chosen.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=chosen.betas, eps=chosen.eps, foreach=False)
    losses = []
    for step in range(chosen.steps):
        rows = [Counting().at(step, micro)["input_ids"] for micro in range(chosen.accumulation)]
        ids = torch.cat(rows)
        logits = model(ids).logits
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, SIZE), ids[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), chosen.clip or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, chosen)
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_of(model: nn.Module, chosen: TrainerSettings) -> list[float]:
    """Of each step."""
    result = Trainer(model, Counting(), chosen).train()
    return [record["loss"] for record in result.history]


@pytest.mark.parametrize("clip", [0.5, 0.0])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_each_steps_loss_is_that_of_a_plain_loop_with_all_batches_in_one(accumulation: int, clip: float) -> None:
    chosen = settings(steps=12, log_every=1, accumulation=accumulation, clip=clip)
    assert losses_of(tiny(**STILL), chosen) == pytest.approx(plain_losses(tiny(**STILL), chosen), rel=1e-4)


def test_activation_checkpointing_changes_no_loss_and_is_off_again_afterwards() -> None:
    kept, again = (run(activation_checkpointing=flag) for flag in (False, True))
    assert [r["loss"] for r in again[1].history] == [r["loss"] for r in kept[1].history]
    assert not again[0].transformer.gradient_checkpointing


def test_a_seed_gives_the_same_run_and_another_seed_other_dropout() -> None:
    one, two, other = (run(seed=seed) for seed in (0, 0, 1))
    assert same(one[0], two[0])
    assert without_times(one[1].history) == without_times(two[1].history)
    assert not same(one[0], other[0])


def test_no_weight_hangs_on_which_library_was_the_faster_in_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_choice, "WORTH_TIMING", 0)
    monkeypatch.setattr(matmul_choice, "_timed", lambda *_: pytest.fail("timed"))

    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(SIZE, 6)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            hidden = self.table(input_ids)
            return {"loss": linear_cross_entropy(hidden, self.table.weight, labels, backend="chunked")}

    Trainer(Chunked(), Counting(), settings(steps=2)).train()


def test_bf16_is_near_float32_and_leaves_the_weights_in_float32() -> None:
    narrow, wide = run(bf16=True), run()
    assert narrow[0].dtype == torch.float32
    assert narrow[1].loss == pytest.approx(wide[1].loss, rel=0.02)
    assert narrow[1].loss != wide[1].loss


@pytest.mark.parametrize("emulated", [True, False])
def test_bf16_is_multiplied_in_float32_where_the_processor_has_no_bf16(
    emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, backward and evaluation; the loss's own products choose for themselves, and so are left to float32."""
    for module in (half_precision_emulation, matmul_choice):
        monkeypatch.setattr(module, "emulated", lambda _: emulated)
    with Multiplied() as seen:
        run(bf16=True, steps=2)
    assert (torch.bfloat16 in seen.dtypes) is not emulated


def test_batches_of_one_step_count_by_their_labels() -> None:
    """The mean over the labels of a step, and not over its batches."""

    class Uneven(Counting):
        def at(self, step: int, micro: int = 0) -> dict[str, torch.Tensor]:
            batch = super().at(step, micro)
            labels = batch["labels"].clone()
            labels[:, 1 if micro else 4 :] = -100
            return {**batch, "labels": labels}

    class Masked(nn.Module):
        """Labels where they are, as a masked model has them."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(SIZE, 6)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.table(input_ids) @ self.table.weight.T
            return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    both = [Uneven().at(0, micro) for micro in range(2)]
    whole = Masked()(**{name: torch.cat([batch[name] for batch in both]) for name in both[0]})["loss"].item()
    result = Trainer(Masked(), Uneven(), settings(steps=1, accumulation=2)).train()
    assert result.loss == pytest.approx(whole, rel=1e-6)


def test_what_is_held_out_is_evaluated_without_dropout_and_by_label() -> None:
    model, result = run()
    model.eval()
    batches = list(Counting().held_out())
    wanted = sum(model(**batch).loss.item() for batch in batches) / len(batches)
    assert result.held_out_loss == pytest.approx(wanted, rel=1e-6)
    assert result.history[-1]["perplexity"] == pytest.approx(math.exp(wanted), rel=1e-6)
    assert [record["step"] for record in result.history if "held_out_loss" in record] == [12, 24]


def test_a_run_learns_and_records_what_it_is_asked_for() -> None:
    told: list[Any] = []
    steps: list[int] = []
    result = Trainer(tiny(), Counting(), settings(), log=told.append, on_step=steps.append).train()
    assert result.history[-1]["loss"] < result.history[0]["loss"] - 0.3
    assert [record["step"] for record in result.history] == [1, *range(3, 25, 3)]
    assert tuple(told) == result.history
    assert steps == list(range(1, 25))
    assert {"step", "loss", "lr", "tokens_per_second", "gradient_norm", "memory_mb", "tie"} <= set(told[0])
    assert "transformer.wte.weight (also lm_head.weight) is one parameter, with weight decay" in told[0]["groups"]
    assert {record["tie"] for record in told} == {"tied"}


def test_a_model_of_transformers_trains_as_ours_does(quiet_transformers: None) -> None:
    import transformers

    ours = tiny(**STILL)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**ours.config.to_dict(), "use_cache": False}))
    theirs.load_state_dict(ours.state_dict())
    chosen = settings(steps=8, log_every=1)
    assert losses_of(theirs, chosen) == pytest.approx(losses_of(ours, chosen), rel=1e-5)


def test_a_model_that_returns_a_tuple_trains_too() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(SIZE, 6)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.table(input_ids) @ self.table.weight.T
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits

    result = Trainer(Bare(), Counting(), settings()).train()
    assert result.history[-1]["loss"] < result.history[0]["loss"]


# --- the tie --------------------------------------------------------------------------------------------------------


def test_at_its_step_the_head_gets_a_matrix_of_its_own_and_trains_on() -> None:
    model, result = run(untie_at_step=11)
    assert model.lm_head.weight is not model.transformer.wte.weight
    assert not torch.equal(model.lm_head.weight, model.transformer.wte.weight)
    assert model.config.tie_word_embeddings is False
    assert [record["tie"] for record in result.history] == ["tied"] * 4 + ["untied"] * 5


def test_until_then_and_at_the_first_step_behind_it_nothing_is_otherwise() -> None:
    """The head is a copy: the loss of step 12 is made by the weights that a tied run has."""
    tied, untied = (run(steps=24, log_every=1, untie_at_step=at)[1].history for at in (None, 11))
    losses = [(one["loss"], two["loss"]) for one, two in zip(tied, untied, strict=True)]
    assert all(one == two for one, two in losses[:11])
    assert losses[11][0] == pytest.approx(losses[11][1], rel=1e-6)
    assert losses[12][0] != losses[12][1]


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_ends_the_run_with_the_step_the_cause_and_what_is_left(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        run(tmp_path, steps=2000, learning_rate=1e30, warmup_steps=1990, clip=0.0, log_every=7)
    said = str(caught.value)
    assert said.startswith("step ")
    assert "is nan" in said or "is inf" in said
    assert "the steps are too large" in said
    assert "there is no checkpoint" in said or "is complete" in said
    assert "(help: use a lower learning rate" in said


def test_a_recipe_that_explodes_under_its_tie_is_named_as_the_cause() -> None:
    model = tiny()
    nn.init.normal_(model.transformer.wte.weight, std=30.0)
    trainer = Trainer(model, Counting(), settings(learning_rate=1e30, clip=0.0, warmup_steps=0))
    with pytest.raises(
        TrainingError, match=r"times ln V: the recipe makes the logits of the tied head too large.*bowline init-loss"
    ):
        trainer.train()


def test_weights_that_are_no_numbers_are_seen_at_the_first_step() -> None:
    model = tiny()
    with torch.no_grad():
        model.transformer.wte.weight[3, 3] = math.nan
    with pytest.raises(TrainingError, match=r"step 1: the loss is nan; .* NaN or infinity in the weights or labels"):
        Trainer(model, Counting(), settings()).train()


def test_a_model_without_a_loss_is_told_so() -> None:
    class Unlabelled(Counting):
        def at(self, step: int, micro: int = 0) -> dict[str, torch.Tensor]:
            return {"input_ids": super().at(step, micro)["input_ids"]}

    with pytest.raises(
        UsageError, match=r"the model returned a LMOutput with no loss, expected a loss of one number.*labels"
    ):
        Trainer(tiny(), Unlabelled(), settings()).train()


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(UsageError, match="has no parameter with requires_grad=True"):
        Trainer(tiny().requires_grad_(False), Counting(), settings())
    with pytest.raises(UsageError, match="has no gradient_checkpointing_enable"):
        Trainer(nn.Linear(2, 2), Counting(), settings(activation_checkpointing=True)).train()
    with pytest.raises(UsageError, match="resume=True without out"):
        Trainer(tiny(), Counting(), settings(), resume=True)


def test_a_model_that_can_do_without_logits_does_while_it_trains() -> None:
    asked: list[bool] = []

    class Able(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.loss_only = nn.Embedding(SIZE, 6), False

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            asked.append(self.loss_only)
            logits = self.table(input_ids) @ self.table.weight.T
            return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    model = Able()
    Trainer(model, Counting(), settings(steps=2)).train()
    assert asked
    assert all(asked)
    assert model.loss_only is False


def test_a_second_run_of_one_trainer_keeps_records_of_its_own() -> None:
    trainer = Trainer(tiny(**STILL), Counting(), settings(steps=3, log_every=1))
    first, second = trainer.train(), trainer.train()
    assert [record["step"] for record in first.history] == [record["step"] for record in second.history] == [1, 2, 3]
    assert second.loss < first.loss


def test_before_its_run_a_trainer_is_at_step_0_and_says_that_there_is_no_optimizer_yet() -> None:
    trainer = Trainer(tiny(), Counting(), settings(steps=2))
    assert trainer.step == 0
    with pytest.raises(UsageError, match=r"has not started .*call train\(\) first"):
        _ = trainer.optimizer
    trainer.train()
    assert (trainer.step, len(trainer.optimizer.param_groups) > 0) == (2, True)


def test_held_out_batches_are_read_one_by_one() -> None:
    """They may be more than the memory holds."""
    events: list[str] = []

    class Watched(Counting):
        def held_out(self) -> Iterator[dict[str, torch.Tensor]]:
            for step in range(5):
                events.append("read")
                yield self.at(step)

    model = tiny()
    model.register_forward_hook(lambda module, inputs, output: events.append("computed"))
    Trainer(model, Watched(), settings(steps=1)).train()
    assert events == ["computed", *["read", "computed"] * 5]
