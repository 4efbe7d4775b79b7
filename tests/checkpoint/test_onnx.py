"""ONNX files as checkpoints: their tensors and rows, table and head by their use, external data, directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bowline.checkpoint import checkpoints_at, find_checkpoints, open_checkpoint
from bowline.checkpoint.weights import read_weights
from bowline.errors import CheckpointError, FormatError, NoCheckpointError
from tests.checkpoint.onnx_files import (
    HEAD,
    TABLE,
    causal,
    dequantised,
    gemm,
    int8,
    lookup,
    merged,
    model,
    norm,
    onnx,
    product,
    save,
)
from tests.checkpoints import GPT2, WTE, table, tied_gpt2, write

ROWS, OWN = table(96, 16), table(96, 16, seed=1)


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert caught.value.help
    return caught.value.message


def ends(path: Path) -> tuple[str | None, list[str], tuple[str, ...]]:
    """The table, the tensors of the heads, and the copies of the table."""
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.graph is not None
        return checkpoint.graph.table, [head.tensor for head in checkpoint.graph.heads], checkpoint.graph.copies


# --- tensors and rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_rows_are_those_of_onnx_and_the_head_has_its_rows_first(tmp_path: Path, external: bool, dtype: Any) -> None:
    path = save(tmp_path / "model.onnx", causal(ROWS.astype(dtype), OWN.astype(dtype)), external=external)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config is None
        assert checkpoint.lints == ()
        assert checkpoint.complete
        assert checkpoint.weight_files == ("model.onnx", "model.onnx_data")[: 1 + external]
        for name, whole in ((TABLE, ROWS), (HEAD, OWN)):
            assert np.array_equal(checkpoint.rows(name), whole.astype(dtype))
            assert np.array_equal(checkpoint.rows(name, 5, 9), whole[5:9].astype(dtype))
        assert checkpoint.tensors[HEAD].strides == (1, 96)
        assert np.array_equal(checkpoint.rows("norm"), np.ones(16, np.float32))


def test_a_large_transposed_head_is_read_by_its_columns(tmp_path: Path) -> None:
    large = table(3000, 16)
    with open_checkpoint(save(tmp_path / "model.onnx", causal(large, large))) as checkpoint:
        for start, stop in ((0, 3000), (1, 2), (17, 800), (2999, 3000), (5, 5)):
            assert np.array_equal(checkpoint.rows(HEAD, start, stop), large[start:stop])


def test_codes_come_as_the_graph_dequantises_them(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    made = dequantised(ROWS, OWN)
    made.graph.output.extend(
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("wte", "head")]
    )
    path = save(tmp_path / "model.onnx", made)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    wte, head = session.run(["wte", "head"], {"input_ids": np.zeros((1, 1), np.int64)})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tensors["wte_quantized"].dtype == "I8*scale"
        assert np.array_equal(checkpoint.rows("wte_quantized"), wte)
        assert np.array_equal(checkpoint.rows("head_quantized"), head.T)
        assert np.array_equal(checkpoint.rows("head_quantized", 7, 9), head.T[7:9])


@pytest.mark.parametrize(("axis", "scales"), [(0, 96), (1, 16), (-2, 96)])
def test_a_scale_for_each_row_or_column(tmp_path: Path, axis: int, scales: int) -> None:
    codes, _ = int8(ROWS)
    scale = np.linspace(1, 2, scales, dtype=np.float32)
    node = onnx.helper.make_node("DequantizeLinear", ["codes", "scale"], ["wte"], axis=axis)
    made = model([node, lookup("wte")], {"codes": codes, "scale": scale}, outputs=["x"])
    with open_checkpoint(save(tmp_path / "model.onnx", made)) as checkpoint:
        expected = codes * (scale[:, None] if axis != 1 else scale)
        assert np.array_equal(checkpoint.rows("codes"), expected.astype(np.float32))
        assert np.array_equal(checkpoint.rows("codes", 3, 5), expected.astype(np.float32)[3:5])


@pytest.mark.parametrize("kind", ["INT8", "UINT8", "FLOAT16", "BFLOAT16", "INT64", "UINT64", "UINT32", "BOOL", "INT16"])
def test_numbers_in_varints_are_those_of_onnx(tmp_path: Path, kind: str) -> None:
    values = [1, 0, 1] if kind == "BOOL" else [3, 0, 120] if kind.startswith(("U", "F", "B")) else [-3, 0, 120]
    coded = onnx.helper.make_tensor("t", getattr(onnx.TensorProto, kind), [3], values)
    assert not coded.raw_data
    with open_checkpoint(save(tmp_path / "model.onnx", model([], {"t": coded}))) as checkpoint:
        expected = onnx.numpy_helper.to_array(coded).astype(np.float64)
        assert np.array_equal(checkpoint.rows("t").astype(np.float64), expected)
        assert np.array_equal(checkpoint.rows("t", 1, 2).astype(np.float64), expected[1:2])


def test_a_wrong_number_of_varints_is_refused(tmp_path: Path) -> None:
    coded = onnx.helper.make_tensor("t", onnx.TensorProto.INT8, [3], [-3, 0, 120])
    coded.dims[:] = [4]
    with (
        open_checkpoint(save(tmp_path / "model.onnx", model([], {"t": coded}))) as checkpoint,
        pytest.raises(FormatError, match="'t' has 3 numbers, expected 4"),
    ):
        checkpoint.rows("t")


# --- table and head ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "heads"),
    [
        (causal(ROWS), [TABLE]),
        (causal(ROWS, OWN), [HEAD]),
        (gemm(ROWS), [TABLE]),
        (gemm(ROWS, OWN), ["lm_head.weight"]),
        (merged(ROWS, OWN, inside=False), [HEAD]),
        (merged(ROWS, OWN, inside=True), [HEAD, f"optimum::if[1]/{HEAD}"]),
    ],
)
def test_head_and_table_are_found_by_their_use(tmp_path: Path, made: Any, heads: list[str]) -> None:
    assert ends(save(tmp_path / "model.onnx", made)) == (TABLE, heads, ())


def test_positions_and_a_matrix_of_the_same_shape_are_neither(tmp_path: Path) -> None:
    nodes = [
        lookup(),
        onnx.helper.make_node("Gather", ["wpe.weight", "positions"], ["p"]),
        onnx.helper.make_node("Add", ["x", "p"], ["sum"]),
        onnx.helper.make_node("LayerNormalization", ["sum", "norm"], ["y"]),
        product("attention", out="qkv"),
        onnx.helper.make_node("Softmax", ["qkv"], ["weights"]),
        onnx.helper.make_node("LayerNormalization", ["weights", "norm"], ["z"]),
        product(operand="z", out="scores"),
        onnx.helper.make_node("Div", ["scores", "cap"], ["capped"]),
        onnx.helper.make_node("Tanh", ["capped"], ["logits"]),
    ]
    tensors = {
        TABLE: ROWS,
        "wpe.weight": table(500, 16),
        "attention": OWN.T,
        HEAD: ROWS.T,
        "norm": np.ones(16, np.float32),
        "positions": np.arange(4),
        "cap": np.float32(30),
    }
    assert ends(save(tmp_path / "model.onnx", model(nodes, tensors))) == (TABLE, [HEAD], ())


def test_an_encoder_has_no_head(tmp_path: Path) -> None:
    nodes = [lookup(), norm(), product("own", out="hidden")]
    made = model(nodes, {TABLE: ROWS, "norm": np.ones(16, np.float32), "own": table(16, 16)}, outputs=["hidden"])
    assert ends(save(tmp_path / "model.onnx", made)) == (TABLE, [], ())


def test_a_graph_without_a_lookup_has_no_table(tmp_path: Path) -> None:
    made = model([product(operand="input_ids")], {HEAD: ROWS.T})
    assert ends(save(tmp_path / "model.onnx", made)) == (None, [], ())


def test_a_second_table_of_the_same_shape_is_a_copy(tmp_path: Path) -> None:
    nodes = [lookup(), lookup("decoder.weight", "x2"), norm(), product()]
    tensors = {TABLE: ROWS, "decoder.weight": ROWS, HEAD: ROWS.T, "norm": np.ones(16, np.float32)}
    assert ends(save(tmp_path / "model.onnx", model(nodes, tensors))) == (TABLE, [HEAD], ("decoder.weight",))


# --- external data ----------------------------------------------------------------------------------------------------


def moved(directory: Path, location: str) -> Path:
    """A model whose external data is at another location than beside it."""
    path = save(directory / "model.onnx", causal(ROWS, OWN), external=True)
    made = onnx.load(path, load_external_data=False)
    for tensor in made.graph.initializer:
        for entry in tensor.external_data:
            entry.value = location if entry.key == "location" else entry.value
    return save(path, made)


def test_external_data_out_of_the_directory_is_not_opened(tmp_path: Path) -> None:
    inner = tmp_path / "model"
    (tmp_path / "secret").write_bytes(bytes(1 << 16))
    (inner).mkdir()
    (inner / "link").symlink_to(tmp_path / "secret")
    for location, said in (
        ("../secret", "leaves the directory with '..'"),
        (str(tmp_path / "secret"), "is an absolute path"),
        ("link", "is a link that leads out of the directory"),
    ):
        assert said in refused(moved(inner, location))


def test_missing_cut_and_cyclic_external_data_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "is in 'other', which is missing" in refused(moved(tmp_path, "other"))
    assert "cannot be read" in refused(moved(tmp_path, "a"))
    assert "which is not a file name" in refused(moved(tmp_path, "."))
    path = save(tmp_path / "model.onnx", causal(ROWS, OWN), external=True)
    data = tmp_path / "model.onnx_data"
    data.write_bytes(data.read_bytes()[:-1])
    assert "but the file has" in refused(path)


# --- directories ------------------------------------------------------------------------------------------------------


def test_a_directory_of_optimum_is_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "model.onnx", causal(ROWS), external=True)
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config == GPT2
        assert set(checkpoint.tensors) == {TABLE, "norm"}
    assert checkpoints_at(tmp_path) == (tmp_path,)
    assert find_checkpoints(tmp_path) == (tmp_path,)


def test_several_files_are_each_a_checkpoint(tmp_path: Path) -> None:
    names = ["decoder_model.onnx", "decoder_model_merged.onnx", "encoder_model.onnx"]
    for name in names:
        save(tmp_path / name, causal(ROWS), external=True)
    assert checkpoints_at(tmp_path) == find_checkpoints(tmp_path) == tuple(tmp_path / name for name in names)
    message = refused(tmp_path)
    assert "3 ONNX files, each a graph of its own ('decoder_model.onnx', " in message


def test_a_model_beside_a_graph_is_still_the_model(tmp_path: Path) -> None:
    tied_gpt2(tmp_path)
    save(tmp_path / "model.onnx", causal(ROWS))
    with open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.tensors) == [WTE]
    assert find_checkpoints(tmp_path) == (tmp_path, tmp_path / "model.onnx")


def test_a_file_that_is_no_graph_is_named(tmp_path: Path) -> None:
    write(tmp_path, {WTE: ROWS}, name="model.onnx")
    assert "model.onnx" in refused(tmp_path / "model.onnx")
    assert "model.onnx" in refused(tmp_path)


def test_a_graph_on_the_hub_is_to_be_downloaded() -> None:
    from tests.checkpoint.formats.onnx.test_graph import Memory

    with pytest.raises(
        NoCheckpointError, match=r"model.onnx: an ONNX graph on the Hub, expected a whole model"
    ) as caught:
        read_weights(Memory(model__onnx=b""))
    assert "download" in (caught.value.help or "")


def test_ends_of_four_bits_are_found_and_not_read(tmp_path: Path) -> None:
    codes = np.zeros((96, 1, 8), np.uint8)
    four = {"domain": "com.microsoft", "bits": 4, "block_size": 16}
    nodes = [
        onnx.helper.make_node("GatherBlockQuantized", ["wte_q4", "input_ids", "scales"], ["x"], **four),
        norm(),
        onnx.helper.make_node("MatMulNBits", ["y", "head_q4", "scales"], ["logits"], N=96, K=16, **four),
    ]
    tensors = {"wte_q4": codes[:, 0], "head_q4": codes, "scales": np.ones((96, 1), np.float32), "norm": np.ones(16)}
    path = save(tmp_path / "model.onnx", model(nodes, tensors))
    assert ends(path) == ("wte_q4", ["head_q4"], ())
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.graph is not None
        assert checkpoint.graph.opaque == {"wte_q4", "head_q4"}
        assert np.array_equal(checkpoint.rows("head_q4"), codes)
