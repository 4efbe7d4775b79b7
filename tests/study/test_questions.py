"""Each question asked of models that are tiny: the experiment runs, its numbers can be kept, drawn and spoken of."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.study.experiment_sizes import QUICK, ExperimentSizes
from bowline.study.experiments import Experiments
from bowline.study.observed_run import equal_width
from bowline.study.questions.question_list import QUESTIONS
from bowline.study.row_search import searches
from bowline.study.small_models import Later, build, held_out_loss, learn, look_steps
from bowline.study.study_text import Padded, prepared
from bowline.study.trained_table import minilm

TINY = ExperimentSizes(
    name="tiny",
    seeds=2,
    vocab_size=512,
    hidden_size=16,
    layers=1,
    heads=2,
    length=32,
    batch=4,
    steps=24,
    held_out_batches=2,
    every_file=40,
    few_tokens=2000,
    sizes_vocab=300,
    sizes_hidden=32,
    queries=100,
)


@pytest.fixture(scope="module")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> Experiments:
    return Experiments(tmp_path_factory.mktemp("study"), TINY)


@pytest.fixture(scope="module")
def numbers(experiments: Experiments) -> dict[str, Any]:
    """What all questions find, in the order of the catalogue."""
    return {name: question.run(experiments) for name, question in QUESTIONS.items()}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_is_answered_from_numbers_that_json_has(name: str, numbers: dict[str, Any]) -> None:
    kept = json.loads(json.dumps(numbers[name], allow_nan=False))
    question = QUESTIONS[name]
    assert kept == numbers[name]
    assert question.conclusion(kept) == question.conclusion(numbers[name])
    assert question.plot(kept).panels
    assert question.asks.endswith("?")


def test_a_run_that_two_questions_ask_of_is_run_once(experiments: Experiments, numbers: dict[str, Any]) -> None:
    again = Experiments(experiments.directory, TINY)
    assert QUESTIONS["gradient"].run(again) == numbers["gradient"]
    assert (again.ran, again.kept) == (0, 4)
    assert len(list((experiments.directory / "units").glob("observed_run.*"))) == 10  # five arms, two seeds


# --- what is known of the numbers beforehand ------------------------------------------------------------------------


def test_the_flag_takes_exactly_one_table(numbers: dict[str, Any]) -> None:
    for row in numbers["flag"]["rows"]:
        table = row["vocab_size"] * row["hidden_size"]
        biases = row["vocab_size"] if row["family"] == "bert" else 0  # untied, BERT has two of them
        assert row["whole"]["untied"] - row["whole"]["tied"] == row["whole"]["table"] + (
            30522 if row["family"] == "bert" else 0
        )
        assert row["untied"]["parameters"] - row["tied"]["parameters"] == table + biases
        assert row["untied"]["weight_bytes"] - row["tied"]["weight_bytes"] == 4 * (table + biases)
        assert row["gradient"]["relative_error"] < 1e-5


def test_the_base_sizes_are_the_published_ones(numbers: dict[str, Any]) -> None:
    tied = {row["family"]: row["whole"]["tied"] for row in numbers["flag"]["rows"]}
    assert tied == {"bert": 109_514_298, "gpt2": 124_439_808, "t5": 60_506_624}


def test_t5_scales_by_the_flag(numbers: dict[str, Any]) -> None:
    factors = {row["family"]: row["gradient"]["head_factor"] for row in numbers["flag"]["rows"]}
    assert factors == pytest.approx({"bert": 1.0, "gpt2": 1.0, "t5": 32**-0.5})


def test_of_a_tied_head_table_and_head_move_alike_and_of_an_untied_one_the_head_alone(numbers: dict[str, Any]) -> None:
    for seed in numbers["gpt2-head"]["tuning"]:
        assert seed["tied"]["input"] == seed["tied"]["head"] > 0
        assert seed["tied"]["hidden"] > 0
        assert seed["untied"]["input"] == seed["untied"]["hidden"] == 0 < seed["untied"]["head"]
        assert seed["tied"]["looks"][0] == seed["untied"]["looks"][0]


def test_a_shared_decoder_stays_and_a_cloned_one_leaves(numbers: dict[str, Any]) -> None:
    for seed in numbers["bert-head"]["seeds"]:
        assert all(look["distance"] == 0 for look in seed["shared"]["looks"])
        distances = [look["distance"] for look in seed["cloned"]["looks"]]
        assert distances[0] == 0 < distances[-1]
        assert seed["cloned"]["looks"][0]["held_out"] == pytest.approx(seed["shared"]["looks"][0]["held_out"])


def test_the_padding_row_moves_without_a_policy_alone_and_by_the_formula(numbers: dict[str, Any]) -> None:
    found = numbers["padding-row"]
    for policy, runs in found["policies"].items():
        for run in runs:
            assert run["labels_that_are_padding"] == 0
            assert run["looks"][0]["input_norm"] == 0
            assert (run["looks"][-1]["input_norm"] > 0) is (policy == "none")
            assert (run["looks"][-1]["output_norm"] > 0) is (policy in ("none", "untied"))
            assert (run["looks"][-1]["chance"] == 0) is (policy == "masked")
    assert found["formula"]["error"] < 1e-5


def test_equal_parameters_are_nearly_equal(numbers: dict[str, Any]) -> None:
    plenty = numbers["tied-untied"]["plenty"]
    assert plenty["narrow"]["parameters"] == pytest.approx(plenty["tied"]["parameters"], rel=0.1)
    assert plenty["untied"]["parameters"] - plenty["tied"]["parameters"] == TINY.vocab_size * TINY.hidden_size


def test_the_first_look_of_a_tied_gpt2_is_near_ln_v(numbers: dict[str, Any]) -> None:
    for losses in numbers["tied-untied"]["plenty"]["tied"]["held_out"]:
        assert losses[0] == pytest.approx(math.log(TINY.vocab_size), abs=0.1)
        assert losses[-1] < losses[0]


def test_the_split_of_the_gradient_adds_up(numbers: dict[str, Any]) -> None:
    for seed in numbers["gradient"]["tied"]:
        for look in seed:
            parts = look["output"] ** 2 + look["input"] ** 2 + 2 * look["output"] * look["input"] * look["cosine"]
            assert math.sqrt(parts) == pytest.approx(look["total"], rel=1e-4)


def test_minilm_is_looked_at_where_it_is_there(numbers: dict[str, Any]) -> None:
    assert bool(numbers["nearest"]["rows"]) is bool(numbers["identity"]["trained"]) is (minilm() is not None)
    if minilm() is not None:
        assert numbers["identity"]["trained"]["MiniLM"]["identity_distance"] == pytest.approx(0.9968, abs=1e-4)


# --- what experiments are made of -----------------------------------------------------------------------------------


def test_the_three_searches_are_those_of_brute_force() -> None:
    random = torch.Generator().manual_seed(0)
    queries, table = torch.randn(40, 6, generator=random), torch.randn(30, 6, generator=random)
    right = torch.randint(30, (40,), generator=random)
    product, cosine, distance = [], [], []
    for query in queries.double():
        rows = table.double()
        product.append(int(torch.stack([query @ row for row in rows]).argmax()))
        cosine.append(int(torch.stack([F.cosine_similarity(query, row, dim=0) for row in rows]).argmax()))
        distance.append(int(torch.stack([(query - row).norm() for row in rows]).argmin()))
    found = searches(queries, table, right)
    assert found["product_is_cosine"] == sum(a == b for a, b in zip(product, cosine, strict=True)) / 40
    assert found["product_is_distance"] == sum(a == b for a, b in zip(product, distance, strict=True)) / 40
    assert found["cosine_is_distance"] == sum(a == b for a, b in zip(cosine, distance, strict=True)) / 40
    assert found["distance_right"] == sum(a == b for a, b in zip(distance, right.tolist(), strict=True)) / 40


def test_a_row_that_is_left_out_is_not_found() -> None:
    table = torch.eye(4) * torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    rows = torch.arange(4)
    assert searches(table, table, rows)["cosine_right"] == 1.0
    assert searches(table, table, rows, but=rows)["cosine_right"] == 0.0


def test_padding_fills_rows_up_and_is_masked_and_no_label(experiments: Experiments) -> None:
    data = prepared(experiments.text, "bert", TINY)
    batches = Padded(data.batches(seed=0), pad=data.pad, seed=0)
    batch = batches.at(3)
    padding = batch["attention_mask"] == 0
    assert 0 < int(padding.sum()) < padding.numel()
    assert (batch["input_ids"][padding] == data.pad).all() and (batch["labels"][padding] == -100).all()
    assert (batch["attention_mask"][:, 0] == 1).all() and (batch["attention_mask"].diff(dim=1) <= 0).all()
    assert all(torch.equal(batch[key], value) for key, value in batches.at(3).items())


def test_a_later_phase_sees_the_batches_that_follow(experiments: Experiments) -> None:
    batches = prepared(experiments.text, "gpt2", TINY).batches(seed=0)
    assert torch.equal(Later(batches, 5).at(2)["input_ids"], batches.at(7)["input_ids"])


def test_short_text_is_the_beginning_of_the_text(experiments: Experiments) -> None:
    data = prepared(experiments.text, "gpt2", TINY)
    seen = torch.cat([data.batches(seed=0, tokens=200).at(step)["input_ids"].flatten() for step in range(20)])
    assert set(seen.tolist()) <= set(data.packed.train[:200].tolist())


def test_learning_looks_before_and_after_and_in_eval_mode(experiments: Experiments) -> None:
    batches = prepared(experiments.text, "gpt2", TINY).batches(seed=0)
    model = build("gpt2", TINY, seed=0)
    before = held_out_loss(model, batches)
    modes: list[bool] = []

    def look() -> dict[str, Any]:
        modes.append(model.training)
        return {"loss": held_out_loss(model, batches)}

    looks = learn(model, batches, TINY, steps=5, seed=0, look=look, at=[0, 2, 5])
    assert [each["step"] for each in looks] == [0, 2, 5]
    assert looks[0]["loss"] == before and looks[-1]["loss"] == held_out_loss(model, batches) < before
    assert modes == [False] * 3


def test_the_held_out_loss_is_the_mean_over_labels(experiments: Experiments) -> None:
    batches = prepared(experiments.text, "bert", TINY).batches(seed=0)
    model = build("bert", TINY, seed=0).eval()
    losses = []
    with torch.no_grad():
        for batch in batches.held_out():
            logits = model(input_ids=batch["input_ids"]).logits
            losses.append(F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none"))
            losses[-1] = losses[-1][batch["labels"].flatten() != -100]
    assert held_out_loss(model, batches) == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)


def test_models_of_one_seed_are_one_model_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, second = (build("gpt2", TINY, seed=1).transformer.wte.weight for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("steps", [1, 9, 10, 60, 500, 3000])
def test_looks_begin_and_end_with_the_run(steps: int) -> None:
    found = look_steps(steps)
    assert (found[0], found[-1]) == (0, steps) and len(set(found)) == len(found) == len(sorted(found))


def test_the_quick_setting_has_an_untied_model_of_as_many_parameters() -> None:
    width = equal_width(QUICK)
    assert width % QUICK.heads == 0 and width < QUICK.hidden_size
