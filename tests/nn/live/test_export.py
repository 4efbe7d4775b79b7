"""One matrix or two in what leaves torch: torch.export, TorchScript, ONNX and the session that runs it."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from bowline.errors import TieError
from bowline.nn import check_ties, find_ties, tie_weights, untie_weights
from bowline.nn.modules.heads import LMHead
from tests.nn.models import HEAD, TinyLM, tied

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
ROWS, WIDTH = 1000, 64
MATRIX = ROWS * WIDTH * 4


# --- torch.export -----------------------------------------------------------------------------------------------------


def exported(model: nn.Module) -> torch.export.ExportedProgram:
    return torch.export.export(model.eval(), (IDS,), strict=False)


def reloaded(program: torch.export.ExportedProgram) -> Any:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    with warnings.catch_warnings():  # torch 2.11 warns that the bytes it reads are not writable
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.export.load(file).module()


def test_an_exported_program_has_two_names_of_which_only_the_heads_is_used() -> None:
    program = exported(tied(TinyLM()))
    assert set(HEAD) <= set(program.state_dict)
    uses = {node.name: len(node.users) for node in program.graph.nodes if node.op == "placeholder"}
    assert uses["p_emb_weight"] == 0
    assert uses["p_head_weight"] == 2, "looked up in, and multiplied by"


def test_loaded_again_the_two_names_are_an_alias_and_a_new_embedding_changes_nothing() -> None:
    model = tied(TinyLM())
    again = reloaded(exported(model))
    assert again.emb.weight is not again.head.weight
    assert [(tie.target, tie.source) for tie in find_ties(again).aliases] == [HEAD]
    assert not find_ties(again).ties
    again.emb.weight = nn.Parameter(torch.zeros(11, 4))
    assert torch.equal(again(IDS), model(IDS)), "emb.weight is dead"


def test_loaded_again_the_gradient_misses_the_embedding_and_a_cast_pulls_the_two_apart() -> None:
    again = reloaded(exported(tied(TinyLM())))
    again(IDS).square().sum().backward()
    assert again.emb.weight.grad is None
    assert again.head.weight.grad is not None
    again.to(torch.float64)
    assert str(find_ties(again)) == "nothing is shared"


def test_tied_again_the_loaded_module_is_one_matrix_and_an_embedding_reaches_the_head() -> None:
    model = tied(TinyLM())
    again = reloaded(exported(model))
    assert tie_weights(again, [HEAD])
    assert again.emb.weight is again.head.weight
    assert torch.equal(again(IDS), model(IDS))
    again(IDS).square().sum().backward()
    model(IDS).square().sum().backward()
    torch.testing.assert_close(again.emb.weight.grad, model.emb.weight.grad)
    with torch.no_grad():
        again.to(torch.float64).emb.weight.zero_()
    assert not again(IDS).any()


def test_a_new_embedding_is_tied_into_the_loaded_module() -> None:
    """The way to put other values into an exported program: name them, and tie."""
    other = tied(TinyLM(seed=1))
    again = reloaded(exported(tied(TinyLM())))
    again.emb.weight = nn.Parameter(other.emb.weight.detach().clone())
    assert check_ties(again, [HEAD])["head.weight"].state == "DIVERGED"
    tie_weights(again, [HEAD], on_conflict="source")
    assert torch.equal(again(IDS), other(IDS))


# --- TorchScript ------------------------------------------------------------------------------------------------------


class Scriptable(nn.Module):
    """What TorchScript can read; its ties are named by the caller, for it keeps no class attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(ROWS, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(ids))  # type: ignore[no-any-return]


SCRIPTED: dict[str, Callable[[nn.Module], Any]] = {
    "trace": lambda model: torch.jit.trace(model, IDS),
    "script": lambda model: torch.jit.script(model),
}
TORCHSCRIPT = pytest.mark.filterwarnings(  # deprecated and widely shipped; torch 2.14 warns by FutureWarning
    "ignore:.*torch.jit.* is deprecated:DeprecationWarning", "ignore:.torch.jit.* is deprecated:FutureWarning"
)
WAYS = pytest.mark.parametrize("way", SCRIPTED.values(), ids=list(SCRIPTED))


def saved_script(module: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return file


def script_and_file(way: Callable[[nn.Module], Any], model: nn.Module) -> tuple[Any, io.BytesIO]:
    module = way(model)
    return module, saved_script(module)


@TORCHSCRIPT
@WAYS
def test_torchscript_keeps_the_tie_and_stores_it_once(way: Callable[[nn.Module], Any]) -> None:
    model = Scriptable()
    model.head.weight = model.emb.weight
    module, file = script_and_file(way, model)
    again = torch.jit.load(file)
    assert module.head.weight is module.emb.weight
    assert again.head.weight is again.emb.weight
    assert MATRIX < len(file.getvalue()) < 1.2 * MATRIX
    assert torch.equal(again(IDS), model(IDS))


@TORCHSCRIPT
@WAYS
def test_the_tie_of_a_script_module_is_found_and_checked_like_any_other(way: Callable[[nn.Module], Any]) -> None:
    model = Scriptable()
    model.head.weight = model.emb.weight
    module, file = script_and_file(way, model)
    for scripted in (module, torch.jit.load(file)):
        assert [(tie.target, tie.source) for tie in find_ties(scripted)] == [HEAD]
        assert check_ties(scripted, [HEAD])


@TORCHSCRIPT
def test_a_loaded_script_holds_no_parameters_that_could_be_tied_and_says_so() -> None:
    clone = Scriptable()
    _, file = script_and_file(SCRIPTED["script"], clone)
    again = torch.jit.load(file)
    assert check_ties(again, [HEAD])["head.weight"].state == "DIVERGED"
    with pytest.raises(TieError, match=r"head\.weight is a TorchScript parameter"):
        tie_weights(again, [HEAD], on_conflict="source")


@TORCHSCRIPT
@WAYS
def test_untied_first_a_script_holds_a_clone_for_readers_that_want_two(way: Callable[[nn.Module], Any]) -> None:
    model = Scriptable()
    model.head.weight = model.emb.weight
    clone = copy.deepcopy(model)
    untie_weights(clone)
    module, file = script_and_file(way, clone)
    assert module.head.weight is not module.emb.weight
    assert len(file.getvalue()) > 2 * MATRIX
    assert torch.equal(module(IDS), model(IDS))
    assert model.head.weight is model.emb.weight


# --- ONNX -------------------------------------------------------------------------------------------------------------

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

Exporter = Literal["dynamo", "legacy", "legacy-unfolded"]


def onnx_model(head: type[nn.Linear]) -> TinyLM:
    model = TinyLM(ROWS, WIDTH)
    model.head = head(WIDTH, ROWS, bias=False)
    return tied(model).eval()


def onnx_export(model: nn.Module, path: Path, exporter: Exporter) -> None:
    if exporter == "dynamo":
        some = {0: torch.export.Dim("batch"), 1: torch.export.Dim("time")}
        how: dict[str, Any] = {
            "dynamo": True,
            "external_data": False,
            "verbose": False,
            "dynamic_shapes": {"ids": some},
        }
    else:
        axes = {"ids": {0: "batch", 1: "time"}}
        folding = exporter == "legacy"
        how = {"dynamo": False, "dynamic_axes": axes, "do_constant_folding": folding}
    with warnings.catch_warnings():  # both exporters warn of what torch will remove from under them
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (IDS,), path, input_names=["ids"], **how)


@dataclass(frozen=True)
class Onnx:
    """An exported file and the same as onnxruntime optimised it for its session: `(matrices, operators)` of each."""

    path: Path
    stored: list[tuple[int, int]]
    operators: list[Any]
    in_session: list[tuple[int, int]]

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        found = onnxruntime.InferenceSession(self.path, providers=["CPUExecutionProvider"]).run(
            None, {"ids": ids.numpy()}
        )
        return torch.from_numpy(found[0])


def matrices(graph: Any) -> list[tuple[int, int]]:
    return [tuple(tensor.dims) for tensor in graph.initializer if len(tensor.dims) == 2]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Callable[[type[nn.Linear], Exporter], Onnx]:
    """Exports each kind of model once: the first export by dynamo takes seconds."""
    done: dict[tuple[type[nn.Linear], Exporter], Onnx] = {}

    def made(head: type[nn.Linear], exporter: Exporter) -> Onnx:
        if (head, exporter) not in done:
            directory = tmp_path_factory.mktemp("onnx")
            path, optimised = directory / "model.onnx", directory / "optimised.onnx"
            onnx_export(onnx_model(head), path, exporter)
            options = onnxruntime.SessionOptions()
            options.optimized_model_filepath = str(optimised)
            options.log_severity_level = 3
            onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            graph = onnx.load(path).graph
            done[head, exporter] = Onnx(path, matrices(graph), list(graph.node), matrices(onnx.load(optimised).graph))
        return done[head, exporter]

    return made


TABLE, TRANSPOSED = (ROWS, WIDTH), (WIDTH, ROWS)
Export = Callable[[type[nn.Linear], Exporter], Onnx]


def test_dynamo_stores_one_matrix_and_onnxruntime_makes_a_second(export: Export) -> None:
    found = export(nn.Linear, "dynamo")
    assert found.stored == [TABLE]
    assert {"Transpose", "MatMul"} <= {node.op_type for node in found.operators}
    assert sorted(found.in_session) == [TRANSPOSED, TABLE], "the folded Transpose"


def test_on_rows_dynamo_makes_a_gemm_and_onnxruntime_keeps_one_matrix(export: Export) -> None:
    found = export(LMHead, "dynamo")
    assert found.stored == found.in_session == [TABLE]
    (product,) = [node for node in found.operators if node.op_type == "Gemm"]
    assert {attribute.name: attribute.i for attribute in product.attribute}["transB"] == 1
    assert not {"Transpose", "MatMul"} & {node.op_type for node in found.operators}


def test_the_legacy_exporter_duplicates_the_matrix(export: Export) -> None:
    found = export(nn.Linear, "legacy")
    assert sorted(found.stored) == [TRANSPOSED, TABLE]
    assert found.path.stat().st_size > 2 * MATRIX


def test_without_constant_folding_the_legacy_exporter_stores_one(export: Export) -> None:
    found = export(nn.Linear, "legacy-unfolded")
    assert found.stored == [TABLE]
    assert found.path.stat().st_size < 1.1 * MATRIX
    assert sorted(found.in_session) == [TRANSPOSED, TABLE], "and onnxruntime folds it all the same"


@pytest.mark.parametrize(
    ("head", "exporter"),
    [(nn.Linear, "dynamo"), (LMHead, "dynamo"), (nn.Linear, "legacy"), (nn.Linear, "legacy-unfolded")],
    ids=["dynamo", "dynamo-on-rows", "legacy", "legacy-unfolded"],
)
def test_whichever_way_it_computes_what_the_model_does(
    head: type[nn.Linear], exporter: Exporter, export: Export
) -> None:
    ids = torch.arange(20).view(4, 5) * 7
    torch.testing.assert_close(export(head, exporter)(ids), onnx_model(head)(ids).detach(), rtol=1e-4, atol=1e-4)
