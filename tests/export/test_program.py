"""torch.export's programs: one matrix in the file, the tie's names recorded, one parameter after loading."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import bowline
from bowline.errors import CheckpointError, UsageError
from bowline.export.program import load_program, quietly
from tests.export.live_models import MODELS, Plain, bert, logits, lstm, one_copy, tokens

ENDS = {
    "gpt2": ("lm_head.weight", "transformer.wte.weight"),
    "bert": ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    "t5": ("lm_head.weight", "shared.weight"),
}
"""By family: the head's name, and the embedding's."""


@pytest.fixture(scope="module", params=["gpt2", "t5"])
def exported(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path, Any]:
    """The family, the model, the program's file and the report."""
    file = tmp_path_factory.mktemp(request.param) / "model.pt2"
    model = MODELS[request.param]()
    return request.param, model, file, bowline.export(model, file, to="pt2")


def test_the_file_holds_one_matrix_and_the_names_of_its_ends(exported: tuple[str, Any, Path, Any]) -> None:
    family, model, file, report = exported
    matrix = model.get_input_embeddings().weight
    with zipfile.ZipFile(file) as archive:
        large = [one for one in archive.infolist() if one.file_size >= matrix.numel() * 4]
        (record,) = (name for name in archive.namelist() if name.endswith("bowline_ties.json"))
        ties = json.loads(archive.read(record))
    assert len(large) == 1
    target, source = ENDS[family]
    assert ties[target] == source
    assert file.stat().st_size == report.nbytes < 1.1 * one_copy(model)
    assert report.copies == 0


def test_the_loaded_module_has_one_parameter_and_computes_the_same_at_any_size(
    exported: tuple[str, Any, Path, Any],
) -> None:
    family, model, file, report = exported
    loaded = load_program(file)
    target, source = ENDS[family]
    names = dict(loaded.named_parameters(remove_duplicate=False))
    assert names.get(target, names[source]) is names[source]
    assert sum(one.numel() for one in loaded.parameters()) == sum(one.numel() for one in model.parameters())
    for batch, length in ((1, 1), (5, 11)):
        inputs = tokens(model, batch, length)
        got: torch.Tensor = loaded(**inputs)
        torch.testing.assert_close(got, logits(model, inputs), atol=1e-4, rtol=0)
    assert report.largest_difference < 1e-4


def test_torchs_own_load_gives_an_alias_that_load_program_ties(tmp_path: Path) -> None:
    """If this fails, torch keeps the tie itself, and `load_program` is not needed for it any more."""
    bowline.export(bert(99), tmp_path / "m.pt2", to="pt2")
    with quietly():
        plain: Any = torch.export.load(tmp_path / "m.pt2").module()
    target, source = ENDS["bert"]
    ends = [plain.get_parameter(name) for name in (target, source)]
    assert ends[0] is not ends[1]
    assert ends[0].data_ptr() == ends[1].data_ptr()


def test_a_loaded_program_trains_as_one_matrix(tmp_path: Path) -> None:
    bowline.export(Plain(), tmp_path / "m.pt2", to="pt2", example=(torch.zeros(3, 7, dtype=torch.int64),))
    loaded = load_program(tmp_path / "m.pt2")
    before = loaded.get_parameter("wte.weight").detach().clone()
    ids = torch.randint(0, 900, (4, 8))
    optimizer = torch.optim.SGD(loaded.parameters(), lr=1.0)
    torch.nn.functional.cross_entropy(loaded(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    ends = dict(loaded.named_parameters(remove_duplicate=False))
    assert not torch.equal(ends["wte.weight"], before)
    assert ends.get("lm_head.weight", ends["wte.weight"]) is ends["wte.weight"]


def test_the_file_names_no_place_of_this_machine(tmp_path: Path) -> None:
    bowline.export(Plain(), tmp_path / "m.pt2", to="pt2", example=(torch.zeros(3, 7, dtype=torch.int64),))
    assert str(Path(__file__).parents[2]).encode() not in (tmp_path / "m.pt2").read_bytes()


def test_an_lstm_whose_length_torch_export_fixes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"LSTMLMHeadModel: torch.export fixes a size of the inputs") as raised:
        bowline.export(lstm(99), tmp_path / "m.pt2", to="pt2")
    assert "torchscript" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_program_of_bowline_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.pt2").write_bytes(b"not a program")
    with pytest.raises(CheckpointError, match=r"is not a program of torch.export"):
        load_program(tmp_path / "m.pt2")
    example = (torch.zeros(3, 7, dtype=torch.int64),)
    with quietly():
        torch.export.save(torch.export.export(Plain(), example), tmp_path / "other.pt2")
    with pytest.raises(CheckpointError, match="has no record of its ties"):
        load_program(tmp_path / "other.pt2")


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_compiled_by_aot_inductor_the_matrix_is_one_constant(tmp_path: Path) -> None:
    model: Any = MODELS["gpt2"]()
    report = bowline.export(model, tmp_path / "model.pt2", to="pt2", aot_inductor=True)
    assert report.outcome == "lm_head.weight <- transformer.wte.weight: one constant in the package"
    assert (report.copies, report.verified, report.sizes) == (0, True, ((3, 7), (2, 6)))
    matrix = model.get_input_embeddings().weight
    assert report.nbytes < one_copy(model) + 0.5 * matrix.numel() * 4, "the code is smaller than half a matrix"
    with zipfile.ZipFile(tmp_path / "model.pt2") as archive:
        (code,) = (name for name in archive.namelist() if name.endswith(".so"))
        assert archive.read(code).count(matrix.detach().numpy().tobytes()) == 1


def test_without_a_compiler_it_says_so_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor.cpp, "cxx", ("/no/such/compiler",))
    with pytest.raises(UsageError, match=r"AOTInductor finds no C\+\+ compiler.*install g"):
        bowline.export(MODELS["gpt2"](), tmp_path / "model.pt2", to="pt2", aot_inductor=True)
    assert not list(tmp_path.iterdir())


def test_aot_inductor_is_for_pt2_alone(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="aot_inductor=True: has no meaning for to='onnx'"):
        bowline.export(MODELS["gpt2"](), tmp_path / "model.onnx", to="onnx", aot_inductor=True)
