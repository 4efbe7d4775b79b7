"""`bowline quantize` on disk: the bits of `quantize_tied`, read by `load_checkpoint`, by transformers, by the audit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from bowline.auditing import audit
from bowline.checkpoint import open_checkpoint as open_files
from bowline.cli import app
from bowline.edit import open_checkpoint, undo
from bowline.edit.content import Stored
from bowline.edit.quantised_rows import Int4Part, Int8Part
from bowline.errors import TieError, UsageError
from bowline.nn import check_ties, load_checkpoint, quantize_tied, save_checkpoint, untie_weights
from bowline.nn.modules.int4_table import Int4Table
from bowline.nn.modules.quantized_table import QuantizedTable
from bowline.nn.tree.table_slots import SharedTable
from tests.nn.modules.test_int4_table import DTYPES, WIDTH, matrix_of
from tests.nn.modules.test_quantized_families import BUILDERS, built, logits

TORCHAO = Path(__file__).parents[2] / ".peers" / "torchao"
FORMS: list[tuple[Any, int | None]] = [("int8", None), ("int8", 8), ("int4", 8)]


def quantized(source: Path, destination: Path, dtype: Any, group_size: int | None) -> str:
    with open_checkpoint(source) as checkpoint:
        return str(checkpoint.edit().quantize(dtype, group_size=group_size).commit(destination))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_part_has_the_bits_of_the_live_table(dtype: torch.dtype, tmp_path: Path) -> None:
    matrix = matrix_of(dtype)
    matrix[7] = torch.finfo(dtype).tiny
    matrix[8] = torch.finfo(dtype).smallest_normal / 8  # subnormal
    matrix[9, 0] = -0.0
    save_file({"m": matrix}, tmp_path / "model.safetensors")
    with open_files(tmp_path) as checkpoint:
        stored = Stored(checkpoint, checkpoint.tensors["m"])
        for size in (2, 32, WIDTH):
            live: dict[str, SharedTable] = {"int4": Int4Table(matrix, size), "int8": QuantizedTable(matrix, size)}
            for name, table in live.items():
                for part in table.PARTS:
                    content = (Int4Part if name == "int4" else Int8Part)(stored, size, part)
                    octets = b"".join(bytes(memoryview(block).cast("B")) for block in content.sources())
                    expected = getattr(table, part)
                    assert content.shape == tuple(expected.shape)
                    assert octets == expected.contiguous().view(torch.uint8).numpy().tobytes(), (name, size, part)
        whole = QuantizedTable(matrix)
        assert torch.equal(whole.scale, QuantizedTable(matrix, WIDTH).scale.view(-1))


@pytest.mark.parametrize(("dtype", "group_size"), FORMS)
@pytest.mark.parametrize("name", BUILDERS)
def test_the_result_loads_with_the_logits_of_quantize_tied(
    name: str, dtype: Any, group_size: int | None, tmp_path: Path
) -> None:
    model = built(name)
    model.save_pretrained(tmp_path / "float")
    quantized(tmp_path / "float", tmp_path / "small", dtype, group_size)
    ties = quantize_tied(model, dtype=dtype, group_size=group_size)
    with torch.device("meta"):
        again = type(model)(transformers.AutoConfig.from_pretrained(tmp_path / "small")).eval()
    assert set(load_checkpoint(again, tmp_path / "small").tied) == set(ties)
    assert check_ties(again)
    assert torch.equal(logits(again), logits(model))
    if name == "gemma" or dtype == "int4":
        save_checkpoint(model, tmp_path / "saved")
        mine, theirs = (load_file(tmp_path / place / "model.safetensors") for place in ("small", "saved"))
        assert {name: one.shape for name, one in mine.items()} == {name: one.shape for name, one in theirs.items()}
    states = [{name: part for name, part in one.state_dict().items() if "table" in name} for one in (again, model)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], part) for name, part in states[1].items())
    report = audit(tmp_path / "small")
    head = next(tie for tie in report.evidence.ties if tie.quantised is not None)
    assert str(head.state) == "SHARED"
    assert report.clean
    stored = {tensor for file in (tmp_path / "small").glob("*.safetensors") for tensor in load_file(file)}
    assert not {tie.target for tie in ties} & stored
    save_checkpoint(again, tmp_path / "again")
    untie_weights(again)
    save_checkpoint(again, tmp_path / "untied")
    assert "quantization_config" not in json.loads((tmp_path / "untied" / "config.json").read_text())


def test_shards_that_do_not_hold_the_table_stay_as_they_are(tmp_path: Path) -> None:
    model = built("llama")
    model.save_pretrained(tmp_path / "float", max_shard_size="6KB")
    shards = sorted(path.name for path in (tmp_path / "float").glob("*.safetensors"))
    assert len(shards) > 2
    for dtype in ("int8", "int4"):
        place = tmp_path / dtype
        quantized(tmp_path / "float", place, dtype, 16)
        changed = [one for one in shards if (place / one).read_bytes() != (tmp_path / "float" / one).read_bytes()]
        assert len(changed) == 1
        again = built("llama")
        load_checkpoint(again, place)
        assert check_ties(again)


def test_in_place_can_be_undone_and_a_plan_writes_nothing(tmp_path: Path) -> None:
    built("llama").save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    runner = CliRunner()
    options = ["--dtype", "int4", "--group-size", "16"]
    planned = runner.invoke(app, ["quantize", str(tmp_path), *options, "--dry-run"])
    assert planned.exit_code == 0, planned.output
    assert "quantize --dtype int4 --group-size 16" in planned.output
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    done = runner.invoke(app, ["quantize", str(tmp_path), *options, "--in-place"])
    assert done.exit_code == 0, done.output
    assert "lm_head.weight" in done.output
    undo(tmp_path)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}


def test_an_untied_model_is_never_tied(tmp_path: Path) -> None:
    model = built("llama")
    untie_weights(model)
    save_checkpoint(model, tmp_path / "untied")
    for dtype in ("int8", "int4"):
        with pytest.raises(TieError, match=r"the model is untied, and one table would tie it"):
            quantized(tmp_path / "untied", tmp_path / "out", dtype, 16)
    found = CliRunner().invoke(app, ["quantize", str(tmp_path / "untied"), str(tmp_path / "out"), "--dtype", "int8"])
    assert found.exit_code == 1
    assert not (tmp_path / "out").exists()


def test_ends_that_differ_and_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    built("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    source = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": source + 1}, file, {"format": "pt"})
    with pytest.raises(TieError, match="the ends differ, so one table cannot serve both"):
        quantized(tmp_path, tmp_path / "out", "int8", None)
    save_file({**tensors, "lm_head.weight": source.clone()}, file, {"format": "pt"})
    quantized(tmp_path, tmp_path / "equal", "int8", None)
    assert "lm_head.weight" not in load_file(tmp_path / "equal" / "model.safetensors")
    source[3, 2] = torch.inf
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(TieError, match="holds values that are not finite"):
        quantized(tmp_path, tmp_path / "out", "int4", 16)


def test_group_sizes_and_quantised_sources_are_refused(tmp_path: Path) -> None:
    built("llama").save_pretrained(tmp_path / "float")
    for dtype, size in (("int4", None), ("int4", 1), ("int8", 3), ("int8", 0)):
        with pytest.raises(UsageError, match=r"group_size=\d+: expected an? (even )?divisor of the width, 16"):
            quantized(tmp_path / "float", tmp_path / "out", dtype, size)
    with pytest.raises(UsageError, match="dtype='fp8': expected int8 or int4"):
        quantized(tmp_path / "float", tmp_path / "out", "fp8", None)
    for dtype in ("int8", "int4"):
        quantized(tmp_path / "float", tmp_path / dtype, dtype, 16)
        with pytest.raises(TieError, match="is stored quantised"):
            quantized(tmp_path / dtype, tmp_path / "out", "int8", None)


def test_names_without_the_prefix_of_the_class_are_refused(tmp_path: Path) -> None:
    """transformers would not find torchao's parts under such names, and the audit no table."""
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=16, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    quantized(tmp_path, tmp_path / "full", "int4", 32)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    for dtype in ("int8", "int4"):
        with pytest.raises(
            TieError, match=r"wte\.weight: is stored without the prefix of GPT2LMHeadModel \(transformer"
        ):
            quantized(tmp_path, tmp_path / "out", dtype, 32)


LOADS = """
import json, sys, torch, transformers
places, seen = sys.argv[1:], []
ids = torch.arange(40).reshape(2, 20)
for place in places:
    try:
        architecture = json.load(open(place + "/config.json"))["architectures"][0]
        model, info = getattr(transformers, architecture).from_pretrained(place, output_loading_info=True)
    except ValueError as error:
        seen.append({"error": str(error)})
        continue
    model.eval()
    more = {"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        logits = model(input_ids=ids, **more).logits
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    others = sorted({type(one).__name__ for name, one in model.named_parameters() if one is not head})
    keys = sorted(key for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in info[kind])
    seen.append({"type": type(head).__name__, "one": head is embedding, "keys": keys, "others": others,
                 "logits": logits.flatten().tolist()})
print(json.dumps(seen))
"""


def predicted(place: Path) -> str | None:
    """The fate that the audit predicts of the head in transformers 5."""
    evidence = audit(place).evidence
    assert evidence.main_tie is not None
    outcome = evidence.outcomes["transformers-5"][evidence.main_tie.tie.target]
    return None if outcome is None else outcome.fate.value


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What transformers with torchao makes of the results, in a process of its own, beside Bowline's logits."""
    if not (TORCHAO / "torchao").is_dir():
        pytest.skip("torchao is not unpacked in .peers/torchao: see the Makefile")
    place, expected = tmp_path_factory.mktemp("quantized"), {}
    for name in BUILDERS:
        for dtype, size in FORMS:
            model, key = built(name), f"{name}-{dtype}-{size}"
            if not (place / name).exists():
                model.save_pretrained(place / name)
            quantized(place / name, place / key, dtype, size)
            quantize_tied(model, dtype=dtype, group_size=size)
            expected[key] = logits(model)
    root = TORCHAO.parents[1]
    done = subprocess.run(
        [sys.executable, "-c", LOADS, *(str(place / key) for key in expected)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TORCHAO), str(root / "src")])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    for key, one in zip(expected, seen, strict=True):
        one["predicted"] = predicted(place / key)
    return {key: (one, expected[key]) for key, one in zip(expected, seen, strict=True)}


@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize("name", BUILDERS)
def test_transformers_loads_int8_as_one_table_for_both_ends(
    name: str, size: int | None, loaded: dict[str, Any]
) -> None:
    seen, expected = loaded[f"{name}-int8-{size}"]
    if name == "gemma":  # transformers would lose its embed_scale
        assert "quant_method" in seen["error"]
        assert seen["predicted"] == "refused"
        return
    assert seen["predicted"] == "tied"
    assert (seen["type"], seen["one"], seen["keys"]) == ("Int8Tensor", True, [])
    assert seen["others"] == ["Parameter"], "nothing else is quantised"
    torch.testing.assert_close(torch.tensor(seen["logits"]), expected.flatten(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BUILDERS)
def test_transformers_refuses_int4(name: str, loaded: dict[str, Any]) -> None:
    seen, _ = loaded[f"{name}-int4-8"]
    assert "quant_method" in seen["error"]
    assert seen["predicted"] == "refused"
