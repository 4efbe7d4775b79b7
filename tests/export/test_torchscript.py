"""TorchScript: one matrix in the file and after loading, or a clone that is a snapshot; free sizes; what is refused."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import bowline
from bowline.errors import CheckpointError, UsageError
from tests.export.live_models import MODELS, Plain, bert, gpt2, llama_directory, logits, one_copy, tokens

IDS = torch.zeros(3, 7, dtype=torch.int64)
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*")  # torch calls TorchScript old


@pytest.mark.parametrize("family", MODELS)
def test_a_shared_head_is_one_matrix_in_the_file_and_computes_the_same_at_any_size(family: str, tmp_path: Path) -> None:
    model = MODELS[family]()
    file = tmp_path / "model.ts"
    report = bowline.export(model, file, to="torchscript")
    assert file.stat().st_size == report.nbytes < 1.02 * one_copy(model)
    assert report.copies == 0
    assert "one matrix in the file, shared when loaded" in str(report)
    loaded = torch.jit.load(str(file))
    for batch, length in ((1, 3), (5, 11)):
        inputs = tokens(model, batch, length)
        got = loaded(*inputs.values())
        torch.testing.assert_close(got, logits(model, inputs), atol=1e-4, rtol=0)
    assert report.verified
    assert report.sizes == ((3, 7), (2, 6))


def trained_on(file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The loaded module's embedding and head after steps of SGD on its parameters, each storage once."""
    loaded: Any = torch.jit.load(str(file))
    parameters = {one.data_ptr(): one for one in loaded.parameters()}
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    ids = torch.randint(0, 900, (4, 8), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(loaded(ids).flatten(0, 1), ids.roll(1, 1).flatten()).backward()
        optimizer.step()
    return loaded.wte.weight.detach(), loaded.lm_head.weight.detach()


def test_training_on_after_a_shared_export_keeps_one_matrix(tmp_path: Path) -> None:
    model, ids = Plain(), torch.zeros(3, 7, dtype=torch.int64)
    bowline.export(model, tmp_path / "shared.ts", to="torchscript", example=(ids,))
    table, head = trained_on(tmp_path / "shared.ts")
    assert not torch.equal(table, model.wte.weight)
    assert torch.equal(table, head)


def test_a_clone_is_a_snapshot_that_training_on_leaves_behind(tmp_path: Path) -> None:
    model, ids = Plain(), torch.zeros(3, 7, dtype=torch.int64)
    report = bowline.export(model, tmp_path / "cloned.ts", to="torchscript", head="cloned", example=(ids,))
    assert report.copies == 1
    assert "the clone is a snapshot" in str(report)
    fresh: Any = torch.jit.load(str(tmp_path / "cloned.ts"))
    assert torch.equal(fresh.wte.weight, fresh.lm_head.weight), "equal at the time of the export"
    table, head = trained_on(tmp_path / "cloned.ts")
    assert not torch.equal(table, head)
    assert model.lm_head.weight is model.wte.weight, "the model itself stays tied"


def test_a_cloned_bert_has_a_decoder_of_its_own_in_the_file(tmp_path: Path) -> None:
    """The threads' question: old exporters cloned the decoder of BERT's MLM head, since they could not share it."""
    model = bert()
    shared = bowline.export(model, tmp_path / "shared.ts", to="torchscript")
    cloned = bowline.export(model, tmp_path / "cloned.ts", to="torchscript", head="cloned")
    matrix = model.bert.embeddings.word_embeddings.weight
    assert cloned.nbytes - shared.nbytes == pytest.approx(matrix.numel() * 4, rel=0.01)
    assert cloned.largest_difference == 0


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = gpt2().train()
    model.transformer.h[0].eval()
    kind, modes = type(model), [module.training for module in model.modules()]
    bowline.export(model, tmp_path / "model.ts", to="torchscript")
    assert type(model) is kind
    assert [module.training for module in model.modules()] == modes
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_checkpoint_of_transformers_is_exported_too(tmp_path: Path, quiet_transformers: None) -> None:
    from transformers import LlamaForCausalLM

    source = llama_directory(tmp_path / "llama")
    report = bowline.export(source, tmp_path / "llama.ts", to="torchscript")
    model = LlamaForCausalLM.from_pretrained(source)
    assert report.nbytes < 1.02 * one_copy(model)
    inputs = tokens(model, 4, 9)
    got = torch.jit.load(str(tmp_path / "llama.ts"))(*inputs.values())
    torch.testing.assert_close(got, logits(model, inputs), atol=1e-4, rtol=0)


def test_a_model_without_a_tie_says_so(tmp_path: Path) -> None:
    ids = torch.zeros(3, 7, dtype=torch.int64)
    report = bowline.export(Plain(tied=False), tmp_path / "m.ts", to="torchscript", example={"ids": ids})
    assert report.outcome == "the model has no tied head"
    assert report.inputs == ("ids",)


def test_an_export_that_was_not_run_says_so(tmp_path: Path) -> None:
    ids = torch.zeros(3, 7, dtype=torch.int64)
    report = bowline.export(Plain(), tmp_path / "m.ts", to="torchscript", example=(ids,), verify=False)
    assert not report.verified
    assert report.lines()[-1] == "not verified: the export was not run"


class Forgetful(Plain):
    """Its trace fixes the number of tokens that it saw."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * int(ids.shape[1])


def test_an_export_that_computes_something_else_is_not_written(tmp_path: Path) -> None:
    ids = torch.zeros(3, 7, dtype=torch.int64)
    with pytest.raises(CheckpointError, match=r"its outputs differ from the model's by .*, expected at most"):
        bowline.export(Forgetful(), tmp_path / "m.ts", to="torchscript", example=(ids,))
    assert list(tmp_path.iterdir()) == []


def test_a_destination_that_exists_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "m.ts").write_text("mine")
    with pytest.raises(CheckpointError, match="exists, expected a new file"):
        bowline.export(gpt2(99), tmp_path / "m.ts", to="torchscript")
    assert (tmp_path / "m.ts").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["m.ts"]


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 30, 1 << 30, 5000))
    with pytest.raises(CheckpointError, match=r"needs .* kB, and the disk has 5 kB free"):
        bowline.export(gpt2(99), tmp_path / "m.ts", to="torchscript")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(CheckpointError, match=r"m\.ts: cannot be written: No space left on device"):
        bowline.export(gpt2(99), tmp_path / "m.ts", to="torchscript")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "coreml"}, "to='coreml': expected one of torchscript, pt2, onnx, gguf, mlx, hf"),
        ({"to": "torchscript", "head": "copied"}, "head='copied': expected 'shared' or 'cloned'"),
        ({"to": "pt2", "head": "cloned"}, "head=cloned: to='pt2' keeps the head shared"),
        ({"to": "torchscript", "opset": 18}, "opset=18: has no meaning for to='torchscript'"),
        ({"to": "torchscript", "example": "ids"}, "example is a str: expected a tuple of tensors"),
        ({"to": "torchscript"}, "example: Plain has no config that says which inputs it takes"),
        ({"to": "torchscript", "example": {"x": IDS}}, "example: Plain does not run on x: .*unexpected keyword"),
        ({"to": "torchscript", "example": (IDS + 900,)}, "example: Plain does not run on input_0: index out of range"),
        ({"to": "gguf"}, "model is a Plain: to='gguf' exports a checkpoint's directory"),
    ],
)
def test_what_cannot_be_exported_is_a_usage_error(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"^{said}"):
        bowline.export(Plain(), tmp_path / "m", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_model_with_the_tied_loss_is_exported_as_without_it(tmp_path: Path) -> None:
    model = gpt2(99)
    bowline.use_tied_loss(model)
    report = bowline.export(model, tmp_path / "m.ts", to="torchscript")
    assert report.copies == 0
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(torch.jit.load(str(tmp_path / "m.ts"))(ids, ids * 0 + 1), gpt2(99).eval()(ids).logits)


def test_a_quantised_table_and_a_model_without_values_are_refused(tmp_path: Path) -> None:
    quantised = gpt2(99)
    bowline.quantize_tied(quantised)
    with pytest.raises(UsageError, match="GPT2LMHeadModel: its table is quantised"):
        bowline.export(quantised, tmp_path / "m.ts", to="torchscript")
    with pytest.raises(UsageError, match="GPT2LMHeadModel: has tensors on meta, expected all on the CPU"):
        bowline.export(gpt2(99).to("meta"), tmp_path / "m.ts", to="torchscript")


FULL = """
import resource, signal, sys, warnings
from pathlib import Path
import bowline, torch
from bowline.errors import CheckpointError
from tests.export.live_models import Plain
warnings.simplefilter("ignore")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for to in ("torchscript", "pt2"):
    try:
        bowline.export(Plain(), Path(sys.argv[1]) / "m", to=to, example=(torch.zeros(3, 7, dtype=torch.int64),))
    except CheckpointError as error:
        print(to, error.message.rpartition(": ")[2])
"""


def test_a_system_that_refuses_more_bytes_ends_neither_the_process_nor_leaves_a_file(tmp_path: Path) -> None:
    """torch's own writer of files calls `std::terminate` then."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.splitlines() == [f"{to} File too large" for to in ("torchscript", "pt2")], done.stderr
    assert list(tmp_path.iterdir()) == []
