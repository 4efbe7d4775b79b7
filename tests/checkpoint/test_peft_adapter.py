"""PEFT adapters as files: what each tensor is, what the config states, and that bad files are refused in one line."""

from __future__ import annotations

import json
import pickle
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bowline.checkpoint.formats.peft_adapter import (
    LARGEST_CONFIG,
    Adapter,
    AdapterConfig,
    Part,
    names_module,
    read_adapter,
)
from bowline.checkpoint.places.byte_source import ByteSource, MemoryBytes
from bowline.checkpoint.places.file_set import FileSet
from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.errors import BowlineError, CheckpointError, FormatError, UnsafePickleError
from tests.checkpoints import write

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"]}
BASE = "base_model.model."
ONES = np.ones((4, 8), np.float32)


class Files(FileSet):
    """Files in memory."""

    location = "adapter"

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def sizes(self) -> dict[str, int]:
        return {name: len(data) for name, data in self.files.items()}

    def open(self, name: str) -> ByteSource:
        return MemoryBytes(name, self.files[name])


def adapter(path: Path, names: list[str], **config: Any) -> Adapter:
    tensors = dict.fromkeys(names, ONES)
    write(path, tensors, name="adapter_model.safetensors", files={"adapter_config": {**CONFIG, **config}})
    return read_adapter(LocalDirectory(path))


def part_of(path: Path, name: str, **config: Any) -> tuple[Part, str, str]:
    (tensor,) = adapter(path, [name], **config).tensors
    return tensor.part, tensor.module, tensor.attribute


def configured(**config: Any) -> AdapterConfig:
    header = b'{"__metadata__":{}}'
    weights = len(header).to_bytes(8, "little") + header
    stated = json.dumps({**CONFIG, **config}).encode()
    return read_adapter(Files({"adapter_config.json": stated, "adapter_model.safetensors": weights})).config


# --- what each tensor is --------------------------------------------------------------------------------------------

LAYER = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "part", "module", "attribute"),
    [
        (f"{LAYER}.lora_A.weight", Part.LORA_A, LAYER, "weight"),
        (f"{LAYER}.lora_B.weight", Part.LORA_B, LAYER, "weight"),
        (f"{LAYER}.lora_B.default.weight", Part.LORA_B, LAYER, "weight"),
        (f"{LAYER}.lora_B.bias", Part.LORA_BIAS, LAYER, "bias"),
        ("model.embed_tokens.lora_embedding_A", Part.EMBEDDING_A, "model.embed_tokens", "weight"),
        ("model.embed_tokens.lora_embedding_B", Part.EMBEDDING_B, "model.embed_tokens", "weight"),
        ("lm_head.lora_magnitude_vector", Part.MAGNITUDE, "lm_head", "weight"),
        ("lm_head.lora_magnitude_vector.weight", Part.MAGNITUDE, "lm_head", "weight"),
        ("model.embed_tokens.token_adapter.trainable_tokens_delta", Part.TOKENS, "model.embed_tokens", "weight"),
        ("lm_head.trainable_tokens_delta", Part.TOKENS, "lm_head", "weight"),
        ("lm_head.base_layer.weight", Part.BASE, "lm_head", "weight"),
        ("lm_head.base_layer.bias", Part.BASE, "lm_head", "bias"),
        ("mlp.experts.base_layer.lora_A.weight", Part.LORA_A, "mlp.experts", "weight"),
        ("model.embed_tokens.weight", Part.BASE, "model.embed_tokens", "weight"),
        ("lm_head.lora_C.weight", Part.UNKNOWN, "lm_head.lora_C", "weight"),
        ("lm_head.lora_A", Part.UNKNOWN, "lm_head", "weight"),
        ("lm_head.lora_A.bias", Part.UNKNOWN, "lm_head", "bias"),
        ("lora_A.weight", Part.UNKNOWN, "", "weight"),
        ("weight", Part.UNKNOWN, "", "weight"),
        ("lm_head.something", Part.UNKNOWN, "lm_head", "something"),
    ],
)
def test_a_tensor_is_known_by_its_name(tmp_path: Path, name: str, part: Part, module: str, attribute: str) -> None:
    assert part_of(tmp_path, BASE + name) == (part, module, attribute)


def test_a_plain_tensor_is_a_saved_module_if_the_config_says_so(tmp_path: Path) -> None:
    saved_modules = ["lm_head", "cls.predictions"]
    assert part_of(tmp_path, f"{BASE}lm_head.weight", modules_to_save=saved_modules)[0] is Part.SAVED
    inner = part_of(tmp_path, f"{BASE}cls.predictions.decoder.bias", modules_to_save=saved_modules)
    assert inner == (Part.SAVED, "cls.predictions.decoder", "bias")
    assert part_of(tmp_path, f"{BASE}lm_head.modules_to_save.weight")[:2] == (Part.SAVED, "lm_head")
    assert part_of(tmp_path, f"{BASE}head.weight", modules_to_save=saved_modules)[0] is Part.BASE


def test_a_bias_is_trained_if_the_config_says_so(tmp_path: Path) -> None:
    assert part_of(tmp_path, f"{BASE}model.norm.bias", bias="all")[0] is Part.BIAS
    assert part_of(tmp_path, f"{BASE}lm_head.base_layer.bias", bias="all")[0] is Part.BIAS
    assert part_of(tmp_path, f"{BASE}model.norm.bias", bias="none")[0] is Part.BASE


def test_tensors_of_other_methods_are_named_as_such(tmp_path: Path) -> None:
    assert part_of(tmp_path, f"{BASE}{LAYER}.hada_w1_a", peft_type="LOHA")[0] is Part.METHOD
    assert part_of(tmp_path, f"{BASE}{LAYER}.lora_E", peft_type="ADALORA")[0] is Part.METHOD
    assert part_of(tmp_path, "prompt_embeddings", peft_type="PROMPT_TUNING")[0] is Part.METHOD


def test_the_tensors_of_a_module_are_together(tmp_path: Path) -> None:
    read = adapter(tmp_path, [f"{BASE}lm_head.lora_A.weight", f"{BASE}lm_head.lora_B.weight"])
    assert {module: list(parts) for module, parts in read.modules.items()} == {"lm_head": [Part.LORA_A, Part.LORA_B]}
    assert [tensor.rank for tensor in read.tensors] == [4, 8]
    assert read.nbytes == 2 * ONES.nbytes
    assert not read.is_pickle


def test_a_name_in_the_config_means_the_end_of_a_path() -> None:
    assert names_module("q_proj", LAYER)
    assert names_module(LAYER, LAYER)
    assert not names_module("proj", LAYER)


# --- what the config states -----------------------------------------------------------------------------------------


def test_ranks_and_scalings_follow_the_patterns() -> None:
    config = configured(rank_pattern={"lm_head": 2}, alpha_pattern={"lm_head": 16}, r=4, lora_alpha=8)
    assert config.settings("lm_head").rank == 2
    assert config.settings("lm_head").scaling(2) == 8.0
    assert config.settings(LAYER).scaling(4) == 2.0
    assert configured(use_rslora=True).settings(LAYER).scaling(4) == 4.0


def test_regular_expressions_of_a_config_are_not_run() -> None:
    config = configured(rank_pattern={"(a+)+$": 2}, target_modules="(a+)+$")
    assert config.settings("a" * 40 + "b").rank is None
    assert config.targets("a" * 40 + "b") is None


def test_targets_and_saved_modules_are_named_by_the_end_of_their_path() -> None:
    config = configured(modules_to_save=["score"])
    assert config.targets(LAYER) is True
    assert config.targets("model.embed_tokens") is False
    assert configured(target_modules=None).targets(LAYER) is None
    assert config.saves("score")
    assert config.saves("score.dense")
    assert not config.saves("lm_head")


@pytest.mark.parametrize("key", ["trainable_token_indices", "token_indices"])
def test_token_ids_are_a_list_or_a_list_for_each_module(key: str) -> None:
    kind = "TRAINABLE_TOKENS" if key == "token_indices" else "LORA"
    (one,) = configured(peft_type=kind, **{key: [3, 5]}).token_ids
    assert (one.module, one.ids) == ("", (3, 5))
    several = configured(peft_type=kind, **{key: {"embed_tokens": [1], "lm_head": [2]}}).token_ids
    assert [(each.module, each.ids) for each in several] == [("embed_tokens", (1,)), ("lm_head", (2,))]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": None}, "no peft_type"),
        ({"peft_type": "NEWER"}, "peft_type is 'NEWER'"),
        ({"peft_type": 3}, "peft_type is 3"),
        ({"r": "8"}, "r is '8', expected a whole number from 1"),
        ({"r": 0}, "r is 0"),
        ({"r": True}, "r is true"),
        ({"r": 1 << 40}, "r is 1099511627776"),
        ({"lora_alpha": "x"}, "lora_alpha is 'x', expected a finite number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes', expected true or false"),
        ({"ensure_weight_tying": 1}, "ensure_weight_tying is 1"),
        ({"rank_pattern": []}, "rank_pattern is an array of 0, expected an object"),
        ({"rank_pattern": {"q": -1}}, r"rank_pattern\['q'\] is -1"),
        ({"alpha_pattern": {"q": None}}, r"alpha_pattern\['q'\] is null"),
        ({"target_modules": [3]}, "target_modules is an array of 1, expected a list of names"),
        ({"target_modules": {"a": 1}}, "target_modules is an object of 1"),
        ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head'"),
        ({"trainable_token_indices": "all"}, "trainable_token_indices is 'all'"),
        ({"trainable_token_indices": {"e": [1, -2]}}, r"trainable_token_indices\['e'\] is -2"),
        ({"trainable_token_indices": [1.5]}, "trainable_token_indices is 1.5"),
        ({"base_model_name_or_path": 5}, "base_model_name_or_path is 5"),
    ],
)
def test_an_entry_of_another_type_is_refused_by_its_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(FormatError, match=f"adapter_config.json: .*{said}"):
        configured(**config)


# --- bad files ------------------------------------------------------------------------------------------------------


def test_missing_files_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a", {"x": ONES}, name="adapter_model.safetensors")
    with pytest.raises(FormatError, match=r"no adapter_config\.json"):
        read_adapter(LocalDirectory(tmp_path / "a"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "adapter_config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(FormatError, match=r"neither adapter_model\.safetensors nor adapter_model\.bin is here"):
        read_adapter(LocalDirectory(tmp_path / "b"))


def test_an_oversized_config_is_refused_before_it_is_read(tmp_path: Path) -> None:
    adapter(tmp_path, [])
    with (tmp_path / "adapter_config.json").open("r+b") as file:
        file.truncate(LARGEST_CONFIG + 1)
    tracemalloc.start()
    with pytest.raises(FormatError, match=f"{LARGEST_CONFIG + 1} bytes, expected at most"):
        read_adapter(LocalDirectory(tmp_path))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_config_that_links_to_itself_or_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    adapter(tmp_path / "a", [])
    config = tmp_path / "a" / "adapter_config.json"
    config.unlink()
    config.symlink_to(config)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        read_adapter(LocalDirectory(tmp_path / "a"))
    config.unlink()
    (tmp_path / "secret").write_text("{}")
    config.symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="leads out of the directory"):
        read_adapter(LocalDirectory(tmp_path / "a"))


@pytest.mark.parametrize("config", ["", "[]", "null", '{"a": 1, "a": 2}', "[" * 100_000, '{"r": NaN', '"\\ud800"'])
def test_a_config_that_is_not_strict_json_or_no_object_is_refused(tmp_path: Path, config: str) -> None:
    adapter(tmp_path, [])
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(FormatError, match=r"^adapter_config\.json: "):
        read_adapter(LocalDirectory(tmp_path))


@pytest.mark.parametrize("length", [0, 7, 8, 60, 200])
def test_a_truncated_safetensors_file_is_refused(tmp_path: Path, length: int) -> None:
    adapter(tmp_path, [f"{BASE}lm_head.lora_A.weight"])
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(FormatError, match=r"adapter_model\.safetensors"):
        read_adapter(LocalDirectory(tmp_path))


class Trap:
    """Unpickled, it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_a_pickle_is_read_without_being_executed(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    torch.save({f"{BASE}lm_head.lora_A.weight": torch.ones(4, 8)}, tmp_path / "adapter_model.bin")
    read = read_adapter(LocalDirectory(tmp_path))
    assert read.is_pickle
    assert [(tensor.part, tensor.stored.shape) for tensor in read.tensors] == [(Part.LORA_A, (4, 8))]
    trap = tmp_path / "trap"
    torch.save({"a": Trap(trap)}, tmp_path / "adapter_model.bin")
    with pytest.raises(UnsafePickleError, match=r"adapter_model\.bin"):
        read_adapter(LocalDirectory(tmp_path))
    assert not trap.exists()
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps(Trap(trap)))
    with pytest.raises(FormatError):
        read_adapter(LocalDirectory(tmp_path))
    assert not trap.exists()


@given(
    st.dictionaries(
        st.sampled_from(sorted({*CONFIG, "modules_to_save", "trainable_token_indices", "rank_pattern"})),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
            max_leaves=6,
        ),
    )
)
def test_any_config_is_read_or_refused_in_one_line(entries: dict[str, Any]) -> None:
    try:
        config = configured(**entries)
        config.settings("lm_head")
        config.targets("lm_head")
        config.saves("lm_head")
    except BowlineError as error:
        assert "\n" not in str(error)


@given(st.binary(max_size=300), st.integers(0, 400))
def test_any_damage_to_the_weights_is_read_or_refused(noise: bytes, at: int) -> None:
    header = json.dumps({f"{BASE}lm_head.lora_A.weight": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}})
    whole = len(header).to_bytes(8, "little") + header.encode() + bytes(8)
    damaged = whole[:at] + noise + whole[at + len(noise) :]
    files = Files({"adapter_config.json": json.dumps(CONFIG).encode(), "adapter_model.safetensors": damaged})
    try:
        read_adapter(files)
    except BowlineError as error:
        assert "\n" not in str(error)


def test_a_name_of_very_many_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="has 5001 parts, expected at most 64"):
        adapter(tmp_path, ["a." * 5000 + "weight"])


def test_long_lists_of_names_cost_little() -> None:
    names = [f"layers.{number}.proj" for number in range(100_000)]
    started = time.perf_counter()
    config = configured(target_modules=names, modules_to_save=names, rank_pattern=dict.fromkeys(names, 3))
    for number in range(1000):
        assert config.targets(f"model.layers.{number}.proj")
        assert config.saves(f"model.layers.{number}.proj.dense")
        assert config.settings(f"model.layers.{number}.proj").rank == 3
    assert time.perf_counter() - started < 20
