"""What is said follows from the numbers: made-up ones of both directions, and of none."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from bowline.plots.panels import Curves
from bowline.study.questions.question_list import QUESTIONS
from tests.study.made_up import NUMBERS, changed


def said(name: str, **values: Any) -> str:
    return QUESTIONS[name].conclusion(changed(name, **values))


@pytest.mark.parametrize("name", QUESTIONS)
def test_two_sentences_are_said(name: str) -> None:
    text = said(name)
    assert text[0].isupper() and text.endswith(".")
    assert len(re.findall(r"\.(?= [A-ZÄÖÜE]|$)", text)) == 2, text


@pytest.mark.parametrize("name", QUESTIONS)
def test_each_figure_has_its_question_as_title_and_no_empty_panel(name: str) -> None:
    sheet = QUESTIONS[name].plot(copy.deepcopy(NUMBERS[name]))
    assert sheet.title.endswith("?")
    assert all(panel.curves if isinstance(panel, Curves) else panel.groups for panel in sheet.panels)


@pytest.mark.parametrize("name", QUESTIONS)
def test_what_is_said_does_not_change_the_numbers(name: str) -> None:
    numbers = copy.deepcopy(NUMBERS[name])
    QUESTIONS[name].conclusion(numbers)
    QUESTIONS[name].plot(numbers)
    assert numbers == NUMBERS[name]


# --- flag -----------------------------------------------------------------------------------------------------------


def test_the_flag_takes_one_table_away() -> None:
    text = said("flag")
    assert "BERT 25.0 % (100.0 M to 75.0 M)" in text
    assert "the file is smaller by one table and training holds four tables less" in text
    assert "its gradient is the sum of both ends', to a relative 2e-07" in text
    assert "in T5 the flag also multiplies what the head is given, by 0.100" in text


def test_bytes_that_do_not_add_up_are_said_not_to() -> None:
    rows = copy.deepcopy(NUMBERS["flag"]["rows"])
    rows[0]["untied"]["bytes_on_disk"] = rows[0]["tied"]["bytes_on_disk"]
    assert "do not differ by exactly that table" in said("flag", rows=rows)


def test_a_gradient_that_is_no_sum_is_said_to_be_none() -> None:
    rows = copy.deepcopy(NUMBERS["flag"]["rows"])
    rows[1]["gradient"]["relative_error"] = 0.2
    assert "its gradient differs from the sum of both ends' by a relative 0.20" in said("flag", rows=rows)


# --- t5-init --------------------------------------------------------------------------------------------------------


def test_a_first_loss_far_above_ln_v_is_named() -> None:
    text = said("t5-init")
    assert "a first loss of 40.0, where ln V is 10.0" in text
    assert "the draws that start beyond 1.5 ln V are untied transformers-t5" in text
    assert "decide whether a recipe starts well" in text
    assert "still behind the best, tied, table 1, logits scaled, by 3.00 nats" in text


def test_no_first_loss_far_above_ln_v_is_said_too() -> None:
    rows = [{**row, "measured": 10.5} for row in NUMBERS["t5-init"]["rows"]]
    text = said("t5-init", rows=rows)
    assert "no draw starts beyond 1.5 ln V" in text
    assert "whether a recipe starts well" not in text


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ((5.5, 6.0, 6.5), "has caught up with the best, tied, table 1, logits scaled, within the error"),
        ((1.0, 1.1, 0.9), "ends as the best of them"),
    ],
)
def test_a_bad_start_that_training_mends_is_said_to_be_mended(ends: tuple[float, ...], verdict: str) -> None:
    runs = [{"looks": [{"step": 0, "held_out": 40.0}, {"step": 10, "held_out": end + 0.4}]} for end in ends]
    assert verdict in said("t5-init", trained={**NUMBERS["t5-init"]["trained"], "transformers-t5, untied": runs})


# --- gpt2-head ------------------------------------------------------------------------------------------------------


def test_a_tied_head_is_the_embedding_and_moves_it() -> None:
    text = said("gpt2-head")
    assert "(50, 4), is the very parameter of the embedding" in text
    assert "missing from named_parameters()" in text
    assert "moves the input embeddings by 30.0 % and the hidden states by 20.0 %" in text
    assert "where an untied copy leaves both as they were; on other text the tied one loses more" in text


def test_a_head_that_is_a_parameter_is_said_to_be_one() -> None:
    names = {**NUMBERS["gpt2-head"]["names"], "listed": True, "is_the_table": False}
    text = said("gpt2-head", names=names)
    assert "is a parameter of its own: it is in named_parameters()" in text and "missing" not in text


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(20.0, "on other text the tied one loses less"), (1.0, "on other text the two lose the same within the error")],
)
def test_what_tuning_the_head_costs_goes_either_way(factor: float, verdict: str) -> None:
    tuning = copy.deepcopy(NUMBERS["gpt2-head"]["tuning"])
    for seed in tuning:
        tied, untied = seed["tied"]["looks"], seed["untied"]["looks"]
        untied[-1]["general"] = 4.0 + factor * (tied[-1]["general"] - 4.0)
    assert verdict in said("gpt2-head", tuning=tuning)


# --- nearest --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cosine", "distance", "answer"),
    [
        (0.97, 0.97, "Yes, nearly"),
        (0.7, 0.97, "By distance yes, by cosine no"),
        (0.97, 0.7, "By cosine yes, by distance no"),
        (0.7, 0.7, "Only in part"),
        (0.2, 0.2, "No"),
    ],
)
def test_whether_the_product_is_the_nearest_row(cosine: float, distance: float, answer: str) -> None:
    tied = copy.deepcopy(NUMBERS["nearest"]["tied"])
    for seed in tied["seeds"]:
        seed[-1] |= {"product_is_cosine": cosine, "product_is_distance": distance}
    assert said("nearest", tied=tied).startswith(answer + ":")


@pytest.mark.parametrize(
    ("cosine", "verdict"),
    [
        (0.2, "finds the next token more often than the cosine, 30.0 % and 20.0 %: norms carry information"),
        (0.4, "finds the next token less often than the cosine, 30.0 % and 40.0 %"),
        (0.3, "equally often within the error"),
    ],
)
def test_which_search_finds_the_token(cosine: float, verdict: str) -> None:
    tied = copy.deepcopy(NUMBERS["nearest"]["tied"])
    for seed, near in zip(tied["seeds"], (1.01, 1.0, 0.99), strict=True):
        seed[-1]["cosine_right"] = near * cosine
    assert verdict in said("nearest", tied=tied)


def test_without_a_trained_table_nothing_is_said_of_it() -> None:
    assert "MiniLM" in said("nearest") and "MiniLM" not in said("nearest", rows={})


# --- bert-head ------------------------------------------------------------------------------------------------------


def test_a_clone_that_drifts_is_only_a_beginning() -> None:
    text = said("bert-head")
    assert "A clone is only a beginning: after 10 further steps decoder and embedding are 30.0 %" in text
    assert "so that the clone is the better one" in text
    assert "a loader that ties them again makes 6.10" in text


def test_a_clone_that_stays_is_said_to_stay() -> None:
    seeds = copy.deepcopy(NUMBERS["bert-head"]["seeds"])
    for seed in seeds:
        seed["cloned"]["looks"][-1] |= {"distance": 0.0, "held_out": 4.0}
        seed["cloned"]["tied_again"] = 4.0
    text = said("bert-head", seeds=seeds)
    assert "The clone stays where it was" in text
    assert "which is equal within the error" in text
    assert "makes no difference beyond the error" in text


def test_a_clone_that_is_worse_is_said_to_be_worse() -> None:
    seeds = copy.deepcopy(NUMBERS["bert-head"]["seeds"])
    for seed in seeds:
        seed["cloned"]["looks"][-1]["held_out"] += 0.5
    assert "so that the clone is the worse one" in said("bert-head", seeds=seeds)


# --- padding-row ----------------------------------------------------------------------------------------------------


def test_a_padding_row_that_drifts_is_explained() -> None:
    text = said("padding-row")
    assert "drifts from 0 to a norm of 0.500" in text and "padding was never once a label" in text
    assert "is the softmax's, (1/N) Σ p(pad) h, to a relative error of 1e-07" in text
    assert "a zero row is given 100 times the chance of one that drifts" in text
    assert "no policy changes the held-out loss beyond the error" in text


def test_a_padding_row_that_stays_and_a_formula_that_fails_are_said() -> None:
    policies = copy.deepcopy(NUMBERS["padding-row"]["policies"])
    for run in policies["none"]:
        run["looks"][-1] |= {"input_norm": 0.001, "chance": 1e-3}
        run["labels_that_are_padding"] = 2
    for run in policies["zeroed"]:
        run["looks"][-1]["input_norm"] = 0.1
        run["held_out"] += 2.0
    text = said("padding-row", policies=policies, formula={"norm": 1.0, "error": 0.5})
    assert "stays near 0" in text and "padding was a label 6 times" in text
    assert "is not (1/N) Σ p(pad) h" in text
    assert "It stays zero where its logit is -inf and a head of its own" in text.replace("there is ", "")
    assert "changes beyond the error by +2 (its gradient is dropped)" in text
    assert "much the same chance" in text


# --- identity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "verdict"),
    [(0.5, "moves the tied table away from it"), (0.05, "towards it"), (0.1, "neither way, within the error")],
)
def test_where_training_moves_the_table(end: float, verdict: str) -> None:
    tables = copy.deepcopy(NUMBERS["identity"]["tables"])
    tables["tied"]["tight_frame_distance"] = [[0.1, value * end] for value in (0.98, 1.0, 1.02)]
    text = said("identity", tables=tables)
    assert text.startswith("No: its rank is at most 10 of 100") and verdict in text


def test_a_table_that_is_the_identity_is_said_to_be() -> None:
    tables = copy.deepcopy(NUMBERS["identity"]["tables"])
    tables["tied"]["identity_distance"] = [[0.0, 0.0]] * 3
    assert said("identity", tables=tables, vocab_size=10, bound=0.0).startswith("Yes:")


# --- tied-untied ----------------------------------------------------------------------------------------------------


def test_tied_against_untied_says_who_is_better() -> None:
    text = said("tied-untied")
    assert (
        "is worse (24.5 ± 0.5 against 20.1 ± 0.3, 3 seeds) beside an untied one of the same width, with 1.00 M" in text
    )
    assert "better (24.5 ± 0.5 against 33.1 ± 0.7, 3 seeds) beside an untied one of 0.61 M" in text
    assert "the tied model's best is better (20.1 ± 0.3 against 24.5 ± 0.5, 3 seeds) beside the untied one's" in text
    assert "correlate at 0.40" in text
    assert "found it" not in text  # as it is expected


def test_the_other_direction_is_said_as_readily_and_who_found_otherwise() -> None:
    plenty = copy.deepcopy(NUMBERS["tied-untied"]["plenty"])
    plenty["untied"], plenty["tied"] = plenty["tied"], plenty["untied"]
    plenty["narrow"]["held_out"] = plenty["tied"]["held_out"][::-1]
    short = copy.deepcopy(NUMBERS["tied-untied"]["short"])
    short["untied"], short["tied"] = short["tied"], short["untied"]
    text = said("tied-untied", plenty=plenty, short=short)
    assert "is better (20.1 ± 0.3 against 24.5 ± 0.5, 3 seeds), where MobileLLM (2024) found it worse, beside" in text
    equal = "neither clearly better nor worse (20.1 ± 0.3 against 20.1 ± 0.3, 3 seeds)"
    assert f"{equal}, where Press and Wolf (2016) found it better" in text
    assert (
        "best is worse (24.5 ± 0.5 against 20.1 ± 0.3, 3 seeds), where Press and Wolf (2016) found it better, beside"
        in text
    )


# --- gradient -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "who"),
    [
        ((5.0, 2.0), "mostly from the head"),
        ((0.2, 0.5), "mostly from the lookup"),
        ((1.1, 0.9), "from both ends about equally"),
        ((0.5, 3.0), "from both ends, in a ratio that changes along training"),
    ],
)
def test_where_the_gradient_comes_from(outputs: tuple[float, ...], who: str) -> None:
    seed = [{"output": output, "input": 1.0, "total": 1.0, "cosine": 0.0} for output in outputs]
    assert f"The shared gradient comes {who}:" in said("gradient", tied=[seed, seed])


@pytest.mark.parametrize(
    ("cosines", "way"),
    [
        ((0.4, 0.3), "they pull the same way"),
        ((-0.4, -0.3), "they pull against each other"),
        ((0.02, -0.05), "they are nearly independent"),
        ((0.4, -0.4), "they agree at some steps and not at others"),
    ],
)
def test_whether_the_two_ends_pull_one_way(cosines: tuple[float, ...], way: str) -> None:
    seed = [{"output": 1.0, "input": 1.0, "total": 1.0, "cosine": cosine} for cosine in cosines]
    assert way in said("gradient", tied=[seed, seed])
