"""`bowline generate` and `bowline fill-mask`, from files to text."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from bowline.cli import app
from bowline.cli.generate import generate, shown
from bowline.errors import BowlineError, CheckpointError, UsageError
from bowline.models.common.tokenizer import Tokenizer
from bowline.models.gpt2 import GPT2Config, GPT2LMHeadModel, GPT2Model
from bowline.models.text_generation import filled_text

TEXT = "the knot holds and does not slip"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpt2")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator([TEXT], vocab_size=280, special_tokens=["<|endoftext|>"], show_progress=False)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=made.get_vocab_size(), n_embd=16, n_layer=1, n_head=2, n_positions=64, eos_token_id=0,
        initializer_range=0.3,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(directory)
    made.save_model(str(directory))
    return directory


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = pytest.importorskip("bowline.models.bert")
    directory = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *TEXT.split()]
    torch.manual_seed(0)
    config = module.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    module.BertForMaskedLM(config).save_pretrained(directory)
    (directory / "vocab.txt").write_text("\n".join(words))
    return directory


def test_generate_prints_the_text_and_what_greedy_adds(gpt2: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(gpt2)
    model = GPT2LMHeadModel.from_pretrained(gpt2)
    prompt = torch.tensor([tokenizer.encode(TEXT)])
    expected = tokenizer.decode(model.generate(prompt, max_new_tokens=12)[0].tolist())
    assert run("generate", str(gpt2), TEXT, "--max-new-tokens", "12") == expected + "\n"
    beams = tokenizer.decode(model.generate(prompt, max_new_tokens=12, num_beams=3)[0].tolist())
    assert run("generate", str(gpt2), TEXT, "--max-new-tokens", "12", "--num-beams", "3") == beams + "\n"


@pytest.mark.parametrize("more", [(), ("--num-beams", "2"), ("--temperature", "3", "--seed", "1")])
def test_what_follows_a_space_begins_a_word(gpt2: Path, more: tuple[str, ...]) -> None:
    beginnings = [TEXT[:3], TEXT[:8], TEXT[:14]]
    texts = [run("generate", str(gpt2), text + " ", "--max-new-tokens", "3", *more) for text in beginnings]
    for text, got in zip(beginnings, texts, strict=True):
        assert got.startswith(text + " ")
    free = [run("generate", str(gpt2), text, "--max-new-tokens", "3", *more) for text in beginnings]
    assert any(not got.startswith(text + " ") for text, got in zip(beginnings, free, strict=True)), "nothing is forced"


def test_draws_begin_with_a_temperature_and_are_repeated_by_a_seed(gpt2: Path) -> None:
    def drawn(*more: str) -> str:
        return run("generate", str(gpt2), TEXT, "--max-new-tokens", "20", *more)

    assert drawn("--temperature", "3", "--seed", "1") == drawn("--temperature", "3", "--seed", "1")
    assert drawn("--temperature", "3", "--seed", "1") != drawn("--temperature", "3", "--seed", "2")
    assert drawn("--top-k", "1") == drawn() == drawn("--top-p", "0.000001")


def test_a_checkpoint_that_says_so_is_drawn_from_unless_the_likeliest_are_asked_for(gpt2: Path, tmp_path: Path) -> None:
    place = shutil.copytree(gpt2, tmp_path / "draws")

    def said(*more: str) -> str:
        return run("generate", str(place), TEXT, "--max-new-tokens", "20", *more)

    likeliest = said()
    for stated in ('{"do_sample": false, "temperature": 3.0}', '{"temperature": 3.0}', '{"do_sample": 1}', "[]"):
        (place / "generation_config.json").write_text(stated)
        assert said() == likeliest
    (place / "generation_config.json").write_text('{"do_sample": true, "temperature": 3.0}')
    assert said("--seed", "1") == said("--seed", "1") != said("--seed", "2")
    assert said("--greedy") == likeliest == said("--top-k", "1")
    for stated_k, same in (("", ["--top-k", "50"]), (', "top_k": 0', []), (', "top_k": 2', ["--top-k", "2"])):
        (place / "generation_config.json").write_text(f'{{"do_sample": true, "temperature": 3.0{stated_k}}}')
        assert said("--seed", "1") == said("--temperature", "3", *same, "--seed", "1")
    assert said("--num-beams", "2") == run("generate", str(gpt2), TEXT, "--max-new-tokens", "20", "--num-beams", "2")
    assert "--greedy takes the most likely token, but --top-k samples one" in refused(
        "generate", str(place), TEXT, "--greedy", "--top-k", "3"
    )
    (place / "generation_config.json").write_text('{"do_sample": true, "temperature": "hot"}')
    assert "temperature='hot'" in refused("generate", str(place), TEXT)
    for wrong in ("[1]", "{}", "1.5"):
        (place / "generation_config.json").write_text(f'{{"do_sample": true, "top_k": {wrong}}}')
        assert f"top_k={wrong}: expected a whole number" in refused("generate", str(place), TEXT)


def test_a_terminal_is_given_pieces_that_make_the_same_text(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run("generate", str(gpt2), TEXT, "--max-new-tokens", "12")
    pieces: list[str] = []

    class Terminal:
        def isatty(self) -> bool:
            return True

    module = sys.modules["bowline.cli.generate"]
    monkeypatch.setattr(module, "sys", type("Sys", (), {"stdout": Terminal()}))
    monkeypatch.setattr(module.typer, "echo", lambda text="", nl=True: pieces.append(text + "\n" * nl))
    generate(str(gpt2), TEXT, max_new_tokens=12)
    assert len(pieces) > 5
    assert "".join(pieces) == "".join(shown(char) for char in whole)


def test_a_terminal_is_never_given_what_moves_its_cursor() -> None:
    assert shown("a\tb\nc\x1b[2J\r") == "a\tb\nc\\x1b[2J\\r"


def test_fill_mask_lists_the_likeliest_tokens_of_each_mask(bert: Path) -> None:
    text = "the [MASK] holds [MASK]"
    content = json.loads(run("fill-mask", str(bert), text, "--top-k", "3", "--output-format", "json"))
    assert content["version"] == 1
    assert [mask["position"] for mask in content["masks"]] == [2, 4]
    from bowline.models.auto import load

    tokenizer = Tokenizer.from_pretrained(bert)
    with torch.no_grad():
        logits = load(bert)(torch.tensor([tokenizer.encode(text)])).logits[0].double()
    for mask in content["masks"]:
        probabilities, tokens = logits[mask["position"]].softmax(-1).topk(3)
        assert [one["token_id"] for one in mask["candidates"]] == tokens.tolist()
        assert [one["token"] for one in mask["candidates"]] == [tokenizer.token(int(token)) for token in tokens]
        assert [one["probability"] for one in mask["candidates"]] == pytest.approx(probabilities.tolist(), rel=1e-5)
    table = run("fill-mask", str(bert), text).splitlines()
    assert len(table) == 12
    assert table[0] == "mask 1, token 2 of the text"
    assert all("%" in line for line in table[1:6])


def refused(*arguments: str) -> str:
    with pytest.raises(UsageError) as caught:
        run(*arguments)
    return str(caught.value)


def test_what_cannot_run_says_why(gpt2: Path, tmp_path: Path) -> None:
    where = str(gpt2)
    assert "no head that predicts masked tokens" in refused("fill-mask", where, "a [MASK]")
    assert "has no tokens" in refused("generate", where, "")
    assert "--seed 1: has no effect, because no token is drawn" in refused("generate", where, TEXT, "--seed", "1")
    assert "--seed -9223372036854775809: expected" in refused(
        "generate", where, TEXT, "--temperature", "1", "--seed", str(-(2**63) - 1)
    )
    assert "--top-p 2.0" in refused("generate", where, TEXT, "--top-p", "2")
    assert "--device 'nowhere'" in refused("generate", where, TEXT, "--device", "nowhere")
    assert "--device 'meta': tensors on this device have no values" in refused(
        "generate", where, TEXT, "--device", "meta"
    )
    assert r"'\udcff': expected a text" in refused("generate", where, "\udcff")  # what a byte that is not UTF-8 becomes
    assert "--length-penalty 1000000000.0: expected" in refused(
        "generate", where, TEXT, "--num-beams", "2", "--length-penalty", "1e9"
    )
    assert "the table of positions has 64" in refused("generate", where, TEXT, "--max-new-tokens", "400")
    model = GPT2LMHeadModel.from_pretrained(gpt2)
    model.save_pretrained(tmp_path)
    assert "no tokenizer" in refused("generate", str(tmp_path), TEXT)
    GPT2Model(model.config).save_pretrained(tmp_path)
    assert "no head that predicts next tokens" in refused("generate", str(tmp_path), TEXT)


def test_an_error_names_the_options_and_not_the_librarys_arguments(gpt2: Path) -> None:
    def said(*more: str) -> str:
        return refused("generate", str(gpt2), TEXT, *more)

    assert said("--temperature", "-1") == (
        "--temperature -1.0: expected a number above 0 (help: for the likeliest token, --greedy)"
    )
    assert "(help: --max-new-tokens " in said("--max-new-tokens", "400")
    assert said("--top-k", "2", "--num-beams", "3").startswith("sampling and --num-beams 3: beams are not sampled")


@pytest.mark.parametrize("wrong", ["no config", "another width", "two matrices"])
def test_what_cannot_be_loaded_is_told_with_its_place_and_a_way_out_that_the_command_line_has(
    gpt2: Path, tmp_path: Path, wrong: str
) -> None:
    place = shutil.copytree(gpt2, tmp_path / "broken")
    if wrong == "no config":
        (place / "config.json").unlink()
    elif wrong == "another width":
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps({**config, "n_embd": 32}))
    else:
        tensors = load_file(place / "model.safetensors")
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1
        save_file(tensors, place / "model.safetensors", {"format": "pt"})
    with pytest.raises(BowlineError) as caught:
        run("generate", str(place), TEXT)
    assert caught.value.message.startswith(f"{place}: ")
    assert "=" not in (caught.value.help or "=")


def test_without_a_number_there_are_forty_new_tokens_or_as_many_as_there_are_positions_for(gpt2: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(gpt2)
    for text, least, most in ((TEXT[:3], 40, 40), (TEXT, 2, 39), (f"{TEXT} {TEXT}", 2, 20)):
        room = 64 - len(tokenizer.encode(text)) + 1
        number = min(40, room)
        assert least <= number <= most
        assert run("generate", str(gpt2), text) == run("generate", str(gpt2), text, "--max-new-tokens", str(number))
        assert f"--max-new-tokens {room} at most" in refused(
            "generate", str(gpt2), text, "--max-new-tokens", str(room + 1)
        )


def test_what_bert_cannot_do_says_why(bert: Path) -> None:
    assert "no [MASK] in the text" in refused("fill-mask", str(bert), "the knot")
    assert "--top-k 0: expected" in refused("fill-mask", str(bert), "the [MASK]", "--top-k", "0")
    assert "--top-k 0: expected a whole number from 1" in refused("fill-mask", str(bert), "the [MASK]", "--top-k", "0")
    assert "--device 'meta': tensors on this device have no values" in refused(
        "fill-mask", str(bert), "the [MASK]", "--device", "meta"
    )
    with pytest.raises(UsageError, match="top_k=True: expected a whole number"):
        filled_text(bert, "the [MASK]", top_k=True)
    assert "no head that predicts next tokens" in refused("generate", str(bert), TEXT)


@pytest.mark.parametrize("verb", ["generate", "fill-mask"])
def test_a_checkpoint_without_a_head_is_not_sent_to_the_other_command(verb: str, minilm: Path, tmp_path: Path) -> None:
    ends = {"generate": "next tokens or masked ones", "fill-mask": "masked tokens or next ones"}
    for place, cls in ((minilm, "BertModel"), (tmp_path, "GPT2Model")):
        if place is tmp_path:
            GPT2Model(GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1)).save_pretrained(place)
        said = refused(verb, str(place), "the [MASK]")
        assert f"{place}: the checkpoint is a {cls}, which has no head that predicts {ends[verb]}" in said
        assert "`bowline generate`" not in said and "`bowline fill-mask`" not in said
        assert "bowline.models.load gives its hidden states" in said
        assert f"`bowline train --init-from {place}` trains it with a head" in said


def test_a_classifier_says_that_it_classifies(tmp_path: Path) -> None:
    module = pytest.importorskip("bowline.models.bert")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    module.BertForSequenceClassification(module.BertConfig(vocab_size=9, **sizes)).save_pretrained(tmp_path)
    for verb in ("generate", "fill-mask"):
        said = refused(verb, str(tmp_path), "the [MASK]")
        assert "the checkpoint is a BertForSequenceClassification, which has no head that predicts " in said
        assert "bowline.models.load gives its classes" in said


def test_each_head_is_sent_to_the_command_that_it_has(gpt2: Path, bert: Path) -> None:
    assert (
        "a BertForMaskedLM has no head that predicts next tokens, only masked ones (help: use `bowline fill-mask`)"
        in refused("generate", str(bert), TEXT)
    )
    assert (
        "a GPT2LMHeadModel has no head that predicts masked tokens, only next ones (help: use `bowline generate`)"
        in refused("fill-mask", str(gpt2), "a [MASK]")
    )


@pytest.mark.parametrize("verb", ["generate", "fill-mask"])
def test_without_torch_the_exit_code_is_2_and_the_message_says_what_to_install(verb: str, gpt2: Path) -> None:
    code = f"import sys; sys.modules['torch'] = None; sys.argv = ['bowline', {verb!r}, {str(gpt2)!r}, 'a']"
    code += "; from bowline.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: bowline {verb} needs torch, which is not installed "
        "(help: pip install '.[torch]' in a checkout, or 'bowline-ties[torch]' once it is on the index)\n"
    )


def test_a_pipe_gets_the_text_and_nothing_else(gpt2: Path) -> None:
    command: list[Any] = [sys.executable, "-m", "bowline", "generate", gpt2, TEXT, "--max-new-tokens", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(TEXT)


def test_a_head_that_is_not_in_the_file_is_not_drawn_to_answer_with(bert: Path, tmp_path: Path) -> None:
    module = pytest.importorskip("bowline.models.bert")
    model = module.BertForMaskedLM.from_pretrained(bert)
    model.bert.save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text((bert / "vocab.txt").read_text())
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"has no cls\.predictions\..* which BertForMaskedLM would initialise at random"
    ):
        filled_text(tmp_path, "the [MASK] holds")
