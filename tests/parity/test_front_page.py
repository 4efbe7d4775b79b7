"""The README's table "Who notices what": each cell is what the tool does here, or is cited.

A cell that is observed is computed by a function below, which makes the failure and listens. A cell that is cited links
to a permanent line of the tool's source, or to a dated result in `benchmarks/results`.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file

import bowline
from bowline.auditing import Severity, audit
from bowline.demo import faults
from bowline.errors import TieError
from tests.nn.guards.guarded import swap_head

accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
HEADING = "## Who notices what"
NOT_ITS_JOB, NOT_RUN = "-", "?"

V4, V5, PEFT, ACCELERATE = "transformers 4.57.1", "transformers 5.23.0", "PEFT 0.21.2", "accelerate 1.15.0"
VLLM, LLAMA_CPP, MLX_LM, OURS = "vLLM 0.32.0", "llama.cpp 0c1e570", "mlx-lm 0.32.2", "Bowline"
COLUMNS = [V4, V5, PEFT, ACCELERATE, VLLM, LLAMA_CPP, MLX_LM, OURS]

DIFFERS = "Load: the head differs from the embedding, the flag is true"
NO_HEAD = "Load: no head is stored, the flag is false"
SAVE = "Save: the model is tied, its flag was set to false"
RESIZE = "Resize: the model that the first row loaded"
MERGE = "Merge: LoRA on the head of a tied model"
META = "Meta device: `to_empty`, `init_empty_weights`"
OLD_OPTIMIZER = "Train: the optimizer is older than `load_state_dict(assign=True)`"
REPLACED = "Train: the head is replaced during the run"
ROWS = [DIFFERS, NO_HEAD, SAVE, RESIZE, MERGE, META, OLD_OPTIMIZER, REPLACED]

Cell = tuple[str, str]
Observation = Callable[[Path], str]
OBSERVED: dict[Cell, Observation] = {}

TRANSFORMERS_4 = "https://github.com/huggingface/transformers/blob/v4.57.1/src/transformers/modeling_utils.py#"
VLLM_TIES = (
    "https://github.com/vllm-project/vllm/blob/4ac7380ac54b0dc018edf2fb99c6b9257e13ac36/"
    "vllm/model_executor/model_loader/weight_tying.py#L73-L97"
)
RUN_IN_VLLM = "benchmarks/results/vllm-2026-11-24.md"
RUN_IN_LLAMA_CPP = "benchmarks/results/llama-cpp-2026-11-24.md"
RUN_IN_MLX_LM = "benchmarks/results/mlx-lm-2026-11-24.md"
CITED: dict[Cell, tuple[str, str]] = {
    (DIFFERS, V4): ("silent: head dropped", TRANSFORMERS_4 + "L3113-L3118"),
    (NO_HEAD, V4): ("warns: head random", TRANSFORMERS_4 + "L5536-L5541"),
    (SAVE, V4): ("silent: head left out", TRANSFORMERS_4 + "L4048-L4076"),
    (RESIZE, V4): ("silent: head lost", TRANSFORMERS_4 + "L3227-L3228"),
    (DIFFERS, VLLM): ("warns: head kept", VLLM_TIES),
    (NO_HEAD, VLLM): ("head random", RUN_IN_VLLM),
    (DIFFERS, LLAMA_CPP): ("head kept, Gemma's dropped", RUN_IN_LLAMA_CPP),
    (NO_HEAD, LLAMA_CPP): ("tied", RUN_IN_LLAMA_CPP),
    (DIFFERS, MLX_LM): ("silent: head dropped", RUN_IN_MLX_LM),
    (NO_HEAD, MLX_LM): ("refused", RUN_IN_MLX_LM),
}
"""What a cell that cannot be run here says, and its source."""


def observed(row: str, column: str) -> Callable[[Observation], Observation]:
    """Registers what computes a cell."""

    def register(function: Observation) -> Observation:
        OBSERVED[row, column] = function
        return function

    return register


# --- how it is heard --------------------------------------------------------------------------------------------------

ABOUT_THE_TIE = re.compile(r"\b(un)?ti(ed?|es|ing)\b|lm_head|\bwte\b|embedding", re.IGNORECASE)


class Heard(logging.Handler):
    """What the libraries log and warn of, where it is about the tie."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __str__(self) -> str:
        return "warns" if any(ABOUT_THE_TIE.search(message) for message in self.messages) else "silent"


@contextmanager
def listening() -> Iterator[Heard]:
    heard, verbosity = Heard(), transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    loggers = [logging.getLogger(name) for name in (None, "transformers", "accelerate", "peft")]
    for logger in loggers:
        logger.addHandler(heard)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield heard
    for logger in loggers:
        logger.removeHandler(heard)
    transformers.logging.set_verbosity(verbosity)
    heard.messages += [str(warning.message) for warning in warned]


# --- models and checkpoints -------------------------------------------------------------------------------------------

HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"
IDS = torch.arange(2, 10)[None]


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def is_tied(model: Any) -> bool:
    return model.lm_head.weight is model.transformer.wte.weight


def diverged(place: Path) -> Path:
    faults.lora_merged_on_head().write(place)
    return place


def headless(place: Path) -> Path:
    faults.flag_flipped().write(place)
    return place


def what_is_left(model: Any, place: Path) -> str:
    """Which of the two stored matrices the model still has."""
    stored = load_file(place / "model.safetensors")
    head = torch.equal(model.lm_head.weight, stored[HEAD])
    embedding = torch.equal(model.transformer.wte.weight, stored[EMBEDDING])
    return {(True, True): "head kept", (True, False): "embedding lost", (False, True): "head dropped"}[head, embedding]


def errors(place: Path) -> str:
    return " ".join(finding.code for finding in audit(place).findings if finding.severity is Severity.ERROR)


# --- Load: the head differs from the embedding, the flag is true ------------------------------------------------------


@observed(DIFFERS, V5)
def _(place: Path) -> str:
    with listening() as heard:
        model = transformers.GPT2LMHeadModel.from_pretrained(diverged(place))
    assert model.config.tie_word_embeddings
    return f"{heard}: {what_is_left(model, place)}"


@observed(DIFFERS, ACCELERATE)
def _(place: Path) -> str:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config.from_pretrained(diverged(place)))
    with listening() as heard:
        accelerate.load_checkpoint_in_model(model, place)
    return f"{heard}: {what_is_left(model, place)}"


@observed(DIFFERS, OURS)
def _(place: Path) -> str:
    return f"error: {errors(diverged(place))}"


# --- Load: no head is stored, the flag is false -----------------------------------------------------------------------


@observed(NO_HEAD, V5)
def _(place: Path) -> str:
    with listening() as heard:
        model = transformers.GPT2LMHeadModel.from_pretrained(headless(place))
    assert not torch.equal(model.lm_head.weight, model.transformer.wte.weight)
    return f"{heard}: head random"


@observed(NO_HEAD, ACCELERATE)
def _(place: Path) -> str:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config.from_pretrained(headless(place)))
    drawn = model.lm_head.weight.detach().clone()
    with listening() as heard:
        accelerate.load_checkpoint_in_model(model, place)
    assert torch.equal(model.lm_head.weight, drawn)
    assert torch.equal(model.transformer.wte.weight, load_file(place / "model.safetensors")[EMBEDDING])
    return f"{heard}: head random"


@observed(NO_HEAD, OURS)
def _(place: Path) -> str:
    return f"error: {errors(headless(place))}"


# --- Save: the model is tied, its flag was set to false ---------------------------------------------------------------


@observed(SAVE, V5)
def _(place: Path) -> str:
    model = gpt2()
    model.config.tie_word_embeddings = False
    with listening() as heard:
        model.save_pretrained(place)
    assert HEAD not in load_file(place / "model.safetensors")
    assert errors(place) == "BW102"
    return f"{heard}: head left out"


@observed(SAVE, OURS)
def _(place: Path) -> str:
    model = gpt2()
    model.config.tie_word_embeddings = False
    bowline.save_checkpoint(model, place)
    again = transformers.GPT2LMHeadModel.from_pretrained(place)
    assert again.config.tie_word_embeddings
    assert is_tied(again)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    return "flag written true"


# --- Resize: the model that the first row loaded ----------------------------------------------------------------------


@observed(RESIZE, V5)
def _(place: Path) -> str:
    model = transformers.GPT2LMHeadModel.from_pretrained(diverged(place))
    with listening() as heard:
        model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
    assert is_tied(model)
    assert not torch.equal(model.lm_head.weight[:-8], load_file(place / "model.safetensors")[HEAD])
    return f"{heard}: head lost"


@observed(RESIZE, OURS)
def _(place: Path) -> str:
    model = transformers.GPT2LMHeadModel.from_pretrained(diverged(place))
    bowline.resize_vocab(model, model.config.vocab_size + 8)
    stored = load_file(place / "model.safetensors")
    assert torch.equal(model.lm_head.weight[:-8], stored[HEAD])
    assert torch.equal(model.transformer.wte.weight[:-8], stored[EMBEDDING])
    return "head kept"


# --- Merge: LoRA on the head of a tied model --------------------------------------------------------------------------


def adapted() -> Any:
    """A tied GPT-2 whose head has an adapter that is not zero."""
    model = peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, target_modules=["lm_head"], fan_in_fan_out=False))
    model.base_model.model.lm_head.lora_B["default"].weight.data.normal_(0, 0.3)
    return model


@observed(MERGE, PEFT)
def _(place: Path) -> str:
    with listening():
        model = adapted()
    embedding = gpt2().transformer.wte.weight
    with listening() as heard:
        merged = model.merge_and_unload()
    assert is_tied(merged)
    assert not torch.equal(merged.transformer.wte.weight, embedding)
    return f"{heard}: embedding changed too"


@observed(MERGE, OURS)
def _(place: Path) -> str:
    with listening():
        model = adapted()
    with pytest.raises(TieError, match="one matrix cannot hold both"):
        bowline.merge_lora(model)
    return "error: `merge_lora`"


# --- Meta device ------------------------------------------------------------------------------------------------------


@observed(META, V5)
def _(place: Path) -> str:
    model = gpt2()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with listening() as heard:
        model.to("meta").to_empty(device="cpu")
        model.load_state_dict(state)
    assert model.config.tie_word_embeddings
    assert not is_tied(model)
    return f"{heard}: tie lost"


@observed(META, ACCELERATE)
def _(place: Path) -> str:
    with listening() as heard, accelerate.init_empty_weights():
        model = gpt2()
    assert model.config.tie_word_embeddings
    assert not is_tied(model)
    return f"{heard}: tie lost"


@observed(META, OURS)
def _(place: Path) -> str:
    model = gpt2()
    with bowline.keep_tied(model):
        model.to("meta").to_empty(device="cpu")
    assert is_tied(model)
    return "tie kept: `keep_tied`"


# --- Train: the optimizer is older than the weights -------------------------------------------------------------------


def with_old_optimizer() -> tuple[Any, torch.optim.Optimizer]:
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model, optimizer


def trainer(model: Any, optimizer: Any, place: Path, *callbacks: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(place), max_steps=3, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    data = [{"input_ids": IDS[0], "labels": IDS[0]}] * 4
    return transformers.Trainer(
        model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None), callbacks=list(callbacks)
    )


def accelerated_step(model: Any, optimizer: Any) -> None:
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()


@observed(OLD_OPTIMIZER, V5)
def _(place: Path) -> str:
    model, optimizer = with_old_optimizer()
    with listening() as heard:
        trainer(model, optimizer, place).train()
    assert all(torch.equal(value, gpt2().state_dict()[name]) for name, value in model.state_dict().items())
    return f"{heard}: nothing trained"


@observed(OLD_OPTIMIZER, ACCELERATE)
def _(place: Path) -> str:
    with listening() as heard:
        model, optimizer = accelerate.Accelerator(cpu=True).prepare(*with_old_optimizer())
        accelerated_step(model, optimizer)
    assert all(torch.equal(value, gpt2().state_dict()[name]) for name, value in model.state_dict().items())
    return f"{heard}: nothing trained"


@observed(OLD_OPTIMIZER, OURS)
def _(place: Path) -> str:
    model, optimizer = with_old_optimizer()
    with pytest.raises(TieError, match="the optimizer does not hold"):
        bowline.check_ties(model, optimizer=optimizer).raise_if_broken()
    return "error: `check_ties`"


# --- Train: the head is replaced during the run -----------------------------------------------------------------------


class ReplacesTheHead(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        if state.global_step == 1:
            swap_head(model)


@observed(REPLACED, V5)
def _(place: Path) -> str:
    model = gpt2()
    with listening() as heard:
        trainer(model, None, place, ReplacesTheHead()).train()
    assert model.config.tie_word_embeddings
    assert not is_tied(model)
    return f"{heard}: tie lost"


@observed(REPLACED, ACCELERATE)
def _(place: Path) -> str:
    model = gpt2()
    with listening() as heard:
        prepared, optimizer = accelerate.Accelerator(cpu=True).prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1)
        )
        swap_head(model)
        accelerated_step(prepared, optimizer)
    assert not is_tied(model)
    return f"{heard}: tie lost"


@observed(REPLACED, OURS)
def _(place: Path) -> str:
    model = gpt2()
    guard = bowline.TieGuard(model)
    with pytest.raises(TieError, match="DIVERGED"):
        trainer(model, None, place, ReplacesTheHead(), guard.trainer_callback()).train()
    return "error: `TieGuard`"


# --- the table --------------------------------------------------------------------------------------------------------


def table() -> tuple[list[str], dict[Cell, str]]:
    """The columns of the README's table, and its cells with their links."""
    section = README.partition(f"{HEADING}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    columns = header[1:]
    return columns, {(row[0], column): cell for row in rows for column, cell in zip(columns, row[1:], strict=True)}


def test_every_cell_is_observed_or_cited_or_says_nothing() -> None:
    columns, cells = table()
    assert columns == COLUMNS
    assert [row for row, column in cells if column == OURS] == ROWS
    claims = {cell for cell, text in cells.items() if text not in {NOT_ITS_JOB, NOT_RUN}}
    assert claims == OBSERVED.keys() | CITED.keys()
    assert not OBSERVED.keys() & CITED.keys()


@pytest.mark.parametrize("cell", list(CITED), ids="-".join)
def test_a_cited_cell_says_what_its_source_does_and_links_to_it(cell: Cell) -> None:
    words, link = CITED[cell]
    assert table()[1][cell] == f"[{words}]({link})"
    assert link.startswith("https://") or (ROOT / link).is_file()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("cell", list(OBSERVED), ids="-".join)
def test_an_observed_cell_says_what_happens(cell: Cell, tmp_path: Path) -> None:
    assert table()[1][cell] == OBSERVED[cell](tmp_path / "checkpoint")


def test_the_versions_are_those_that_are_installed() -> None:
    for column in (V5, PEFT, ACCELERATE):
        name, version = column.split()
        assert importlib.metadata.version(name) == version
