"""`save_checkpoint`: what is stored, what the config says of it, what becomes of the directory, what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from tools.tiny import build, load_class
from torch import nn

from bowline.auditing import audit
from bowline.errors import CheckpointError, ConfigError, UsageError
from bowline.nn import find_ties, load_checkpoint, save_checkpoint, tie_weights, untie_weights
from tests.checkpoints import snapshot as files_of
from tests.nn.models import BertLike, EncoderDecoder, TinyLM, tied

WEIGHTS = "model.safetensors"


def names_in(directory: Path) -> set[str]:
    return set(load_file(directory / WEIGHTS))


def metadata_of(directory: Path) -> dict[str, str]:
    with safe_open(directory / WEIGHTS, "pt") as file:
        return dict(file.metadata())


def config_of(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return content


def same(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def lm(seed: int = 0) -> TinyLM:
    return tied(TinyLM(seed=seed))


def table(seed: int = 0) -> EncoderDecoder:
    model = EncoderDecoder()
    tie_weights(model, on_conflict="source")
    with torch.no_grad():
        model.shared.weight.add_(seed)
    return model


# --- what is stored ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "stored"),
    [
        ("source", {"shared.weight"}),
        ("target", {"head.weight"}),
        ("both", {"shared.weight", "encoder.weight", "decoder.weight", "head.weight"}),
    ],
)
def test_of_one_matrix_under_four_names_what_was_asked_for_is_kept(keep: Any, stored: set[str], tmp_path: Path) -> None:
    save_checkpoint(table(seed=3), tmp_path, keep=keep)
    assert names_in(tmp_path) == stored
    again = table()
    assert load_checkpoint(again, tmp_path)
    assert same(again, table(seed=3))
    assert len(find_ties(again)) == 3


@pytest.mark.parametrize("keep", ["source", "target"])
def test_a_plain_models_ties_are_in_the_metadata_as_safetensors_writes_them(keep: Any, tmp_path: Path) -> None:
    save_checkpoint(table(seed=3), tmp_path, keep=keep)
    kept, *_ = names_in(tmp_path)
    names = {"shared.weight", "encoder.weight", "decoder.weight", "head.weight"}
    assert metadata_of(tmp_path) == {"format": "pt"} | dict.fromkeys(names - {kept}, kept)
    again = table()
    assert not any(load_model(again, tmp_path / WEIGHTS)), "nothing missing, nothing unexpected"
    assert same(again, table(seed=3))


def test_a_bias_tie_is_stored_once_too(tmp_path: Path) -> None:
    model = BertLike()
    tie_weights(model, on_conflict="source")
    save_checkpoint(model, tmp_path)
    assert names_in(tmp_path) == {"emb.weight", "transform.weight", "transform.bias", "bias"}


class Odd(nn.Module):
    """Tensors of every shape, layout and dtype that a file can hold."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.transposed = nn.Parameter(torch.randn(3, 5, generator=generator).T)
        self.strided = nn.Parameter(torch.randn(10, generator=generator)[::3])
        self.expanded = nn.Parameter(torch.ones(1).expand(4))
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.empty = nn.Parameter(torch.empty(0, 7))
        self.conjugate = nn.Parameter(torch.randn(3, dtype=torch.complex64, generator=generator).conj())
        self.negative = nn.Parameter(torch.randn(3, dtype=torch.complex64, generator=generator).conj().imag)
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2):
            values = torch.randn(3, 2, generator=generator).to(dtype)
            self.register_buffer(str(dtype).replace("torch.", "of_"), values)
        for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16):
            self.register_buffer(str(dtype).replace("torch.", "of_"), torch.tensor([0, 1, 3]).to(dtype))


def test_every_layout_and_dtype_is_read_back_by_safetensors_bit_for_bit(tmp_path: Path) -> None:
    model = Odd()
    save_checkpoint(model, tmp_path)
    loaded = load_file(tmp_path / WEIGHTS)
    assert loaded.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert loaded[name].dtype is value.dtype
        assert loaded[name].shape == value.shape
        plain = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), plain.view(torch.uint8)), name


def test_two_parameters_on_one_memory_are_written_out_because_no_loader_makes_an_alias(tmp_path: Path) -> None:
    model = TinyLM()
    model.head.weight = nn.Parameter(model.emb.weight.detach())
    save_checkpoint(model, tmp_path)
    assert {"emb.weight", "head.weight"} <= names_in(tmp_path)
    assert metadata_of(tmp_path) == {"format": "pt"}


def test_buffers_that_modules_share_are_written_under_each_name(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    positions = torch.arange(5)
    for module in model.values():
        module.register_buffer("positions", positions)
    save_checkpoint(model, tmp_path)
    assert {"a.positions", "b.positions"} <= names_in(tmp_path)


@pytest.mark.parametrize("size", [100, "0.0001MB", 1])
def test_shards_and_their_index_hold_each_tensor_once(size: str | int, tmp_path: Path) -> None:
    files = save_checkpoint(lm(), tmp_path, max_shard_size=size)
    index = json.loads((tmp_path / files[-1]).read_text())
    assert files[-1] == "model.safetensors.index.json"
    assert sorted(set(index["weight_map"].values())) == sorted(files[:-1])
    stored = {name: shard for shard in files[:-1] for name in load_file(tmp_path / shard)}
    assert stored == index["weight_map"]
    assert "head.weight" not in stored
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in TinyLM().state_dict().values()) - 11 * 4 * 4


# --- wrappers ---------------------------------------------------------------------------------------------------------

IMPORTS_OF_COMPILE = pytest.mark.filterwarnings(  # torch's own; torch 2.14 warns by FutureWarning
    "ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit.script. is deprecated:FutureWarning:torch.jit._script"
)


@IMPORTS_OF_COMPILE
def test_what_torch_wraps_around_a_model_leaves_no_trace_in_names(tmp_path: Path) -> None:
    model = lm(seed=1)
    for at, wrapped in enumerate([torch.compile(model), nn.DataParallel(model), torch.compile(nn.DataParallel(model))]):
        assert isinstance(wrapped, nn.Module)
        save_checkpoint(wrapped, tmp_path / str(at))
        assert names_in(tmp_path / str(at)) == {"emb.weight", "norm.weight", "norm.bias"}
        again = lm()
        load_checkpoint(nn.DataParallel(again), tmp_path / str(at))
        assert same(again, model)


@IMPORTS_OF_COMPILE
def test_a_part_that_is_compiled_leaves_no_trace_either(tmp_path: Path) -> None:
    model: Any = lm(seed=1)
    model.norm = torch.compile(model.norm)
    save_checkpoint(model, tmp_path)
    assert names_in(tmp_path) == {"emb.weight", "norm.weight", "norm.bias"}
    load_checkpoint(model, tmp_path)
    again = lm()
    load_checkpoint(again, tmp_path)
    assert torch.equal(again.norm.weight, model.norm.weight)


# --- configs of plain models ------------------------------------------------------------------------------------------


@dataclass
class Settings:
    width: int = 4
    tie_word_embeddings: bool = True


@pytest.mark.parametrize("config", [Settings(), {"width": 4, "tie_word_embeddings": True}])
def test_the_flag_that_is_written_is_the_one_that_the_tensors_make_true(config: Any, tmp_path: Path) -> None:
    model: Any = TinyLM()
    model.config = config
    save_checkpoint(model, tmp_path / "untied")
    assert config_of(tmp_path / "untied") == {"width": 4, "tie_word_embeddings": False}
    save_checkpoint(tied(model), tmp_path / "tied")
    assert config_of(tmp_path / "tied") == {"width": 4, "tie_word_embeddings": True}
    assert (config["tie_word_embeddings"] if isinstance(config, Mapping) else config.tie_word_embeddings) is True


def test_a_clone_is_not_a_tie_and_is_stored_with_a_false_flag(tmp_path: Path) -> None:
    model: Any = TinyLM()
    model.config = Settings()
    model.head.weight = nn.Parameter(model.emb.weight.detach().clone())
    save_checkpoint(model, tmp_path)
    assert config_of(tmp_path)["tie_word_embeddings"] is False
    assert {"emb.weight", "head.weight"} <= names_in(tmp_path)


def test_a_config_that_json_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    model: Any = lm()
    model.config = {"width": 4, "dtype": torch.float32}
    with pytest.raises(ConfigError, match="dtype"):
        save_checkpoint(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_config_that_was_there_stays_and_says_what_the_new_bytes_say(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "tie_word_embeddings": False}))
    model: Any = lm(seed=1)
    model.config = SimpleNamespace(tie_word_embeddings=True)
    save_checkpoint(model, tmp_path)
    assert config_of(tmp_path) == {"model_type": "gpt2", "tie_word_embeddings": True}


# --- the directory ----------------------------------------------------------------------------------------------------

OLD = (
    "model.safetensors",
    "model.safetensors.index.json",
    "model-00001-of-00003.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model-00001-of-00002.bin",
)
OTHERS = ("README.md", "tokenizer.json", "training_args.bin", "adapter_model.safetensors", "model.safetensors.backup")


def test_old_weights_go_and_other_files_stay(tmp_path: Path) -> None:
    for name in (*OLD, *OTHERS):
        (tmp_path / name).write_text(f"old {name}")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "model.safetensors").write_text("of another model")
    files = save_checkpoint(lm(seed=1), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*files, *OTHERS, "logs"])
    assert all((tmp_path / name).read_text() == f"old {name}" for name in OTHERS)
    assert (tmp_path / "logs" / "model.safetensors").read_text() == "of another model"


def test_shards_give_way_to_one_file_and_back(tmp_path: Path) -> None:
    for size in (100, "5GB", 60):
        files = save_checkpoint(lm(seed=1), tmp_path, max_shard_size=size)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)
        again = lm()
        load_checkpoint(again, tmp_path)
        assert same(again, lm(seed=1))


def test_a_directory_behind_a_link_is_changed_and_the_link_stays(tmp_path: Path) -> None:
    save_checkpoint(lm(), tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    save_checkpoint(lm(seed=1), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    again = lm()
    load_checkpoint(again, tmp_path / "real")
    assert same(again, lm(seed=1))


def test_a_model_is_saved_over_the_files_that_it_is_mapped_from(tmp_path: Path) -> None:
    save_checkpoint(lm(seed=1), tmp_path, max_shard_size=100)
    with torch.device("meta"):
        model = lm()
    load_checkpoint(model, tmp_path)
    with torch.no_grad():
        model.emb.weight[0] += 1
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for size in ("5GB", 100, "5GB"):
        save_checkpoint(model, tmp_path, max_shard_size=size)
        again = lm()
        load_checkpoint(again, tmp_path)
        assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())
        assert same(again, model)


def test_the_model_is_as_it_was_and_an_audit_has_nothing_to_say(tmp_path: Path) -> None:
    model: Any = lm(seed=1)
    model.config = Settings()
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters(remove_duplicate=False)}
    save_checkpoint(model, tmp_path)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])
    assert model.config == Settings()
    assert not [finding for finding in audit(tmp_path).findings if finding.severity.value != "info"]


# --- refusals ---------------------------------------------------------------------------------------------------------


def on_meta() -> nn.Module:
    return lm().to("meta")


def sparse() -> nn.Module:
    model = lm()
    model.register_buffer("mask", torch.eye(3).to_sparse())
    return model


def quantised() -> nn.Module:
    model = lm()
    model.register_buffer("codes", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    return model


def packed() -> nn.Module:
    model = lm()
    model.register_buffer("packed", torch.zeros(3, dtype=torch.complex128))
    return model


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*:")
@pytest.mark.parametrize(
    ("made", "says"),
    [
        (on_meta, r"emb\.weight: is on meta"),
        (sparse, r"mask: .*torch\.sparse_coo"),
        (quantised, r"codes: .*qint8"),
        (packed, r"packed: has the dtype complex128, which safetensors cannot store .*: convert it"),
    ],
)
def test_what_safetensors_cannot_hold_is_named_and_nothing_is_written(made: Any, says: str, tmp_path: Path) -> None:
    save_checkpoint(lm(seed=1), tmp_path / "model")
    before = files_of(tmp_path)
    with pytest.raises(CheckpointError, match=says):
        save_checkpoint(made(), tmp_path / "model")
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "says"),
    [({"keep": "neither"}, "keep='neither'"), ({"max_shard_size": "5 parsecs"}, "max_shard_size='5 parsecs'")],
)
def test_an_option_that_means_nothing_is_refused(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        save_checkpoint(lm(), tmp_path / "model", **options)
    assert not (tmp_path / "model").exists()


def test_a_place_that_is_no_directory_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="file"):
        save_checkpoint(lm(), tmp_path / "file")
    with pytest.raises(CheckpointError):
        save_checkpoint(lm(), tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "mine"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize("directory", ["", None, b"out", "a\0b"])
def test_what_is_no_path_is_refused_and_nothing_is_replaced(
    directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").touch()
    with pytest.raises(UsageError, match="expected a path"):
        save_checkpoint(lm(), directory)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("size", [None, 1e9, True, "5 apples"])
def test_a_size_that_means_nothing_is_refused(size: Any, tmp_path: Path) -> None:
    says = re.escape(f"max_shard_size={size!r}: expected a positive whole number of bytes")
    with pytest.raises(UsageError, match=says):
        save_checkpoint(lm(), tmp_path / "out", max_shard_size=size)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks by the old name
def test_an_adapted_model_is_not_saved_under_names_that_nobody_finds(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(
        build(load_class("GPT2LMHeadModel")), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    )
    with pytest.raises(CheckpointError, match=r"belongs to an adapter") as caught:
        save_checkpoint(adapted, tmp_path / "out")
    assert "merge_lora" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_model_is_not_saved_beside_an_adapter_that_would_be_applied_to_it(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="belongs to an adapter"):
        save_checkpoint(build(load_class("GPT2LMHeadModel")), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter_config.json"]


def test_a_parametrized_head_is_not_saved_as_two_tensors_that_nobody_puts_together(tmp_path: Path) -> None:
    model = build(load_class("GPT2LMHeadModel"))
    untie_weights(model)
    torch.nn.utils.parametrizations.weight_norm(model.lm_head)
    with pytest.raises(CheckpointError, match="parametrized end of a tie"):
        save_checkpoint(model, tmp_path / "out")
