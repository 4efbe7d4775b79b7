"""A trained model through its whole way out, a command each: pruned, tuned, merged, quantised, exported.

Each step's result is read by the next loader: PEFT, transformers, Bowline, llama.cpp, onnxruntime.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from tools.prune_table import CORPORA, write_corpora
from typer.testing import CliRunner

from bowline.auditing import audit_adapter
from bowline.cli import app
from bowline.nn import load_checkpoint
from tests.export.test_real_exports import by_llama_cpp, by_transformers, needs_llama_cpp

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("quiet_transformers"), pytest.mark.filterwarnings("ignore")]

TEXT = "The try statement specifies exception handlers"
STEPS = 20


def bowline(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def causal(place: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()


def ids_of(place: Path, text: str = TEXT) -> list[int]:
    found: list[int] = transformers.AutoTokenizer.from_pretrained(place)(text, add_special_tokens=False)["input_ids"]
    return found


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids])).logits
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chain")


@pytest.fixture(scope="module")
def pruned(smollm2: Path, place: Path) -> Path:
    documents = write_corpora(place / "help")[CORPORA[1]]
    bowline("prune", smollm2, place / "pruned", "--corpus", *documents)
    return place / "pruned"


@pytest.fixture(scope="module")
def lora(pruned: Path, place: Path) -> Path:
    """A LoRA of rank 8 at the attention and at both ends of the tie, which PEFT trains as one, after 20 steps."""
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "embed_tokens", "lm_head"]
    adapted: Any = get_peft_model(causal(pruned), LoraConfig(r=8, target_modules=targets, ensure_weight_tying=True))
    text = "\n".join(path.read_text() for path in sorted((place / "help").iterdir())[:20])
    ids = torch.tensor(ids_of(pruned, text))
    batch = ids[: 64 * (len(ids) // 64)].reshape(-1, 64)
    optimizer = torch.optim.AdamW([one for one in adapted.parameters() if one.requires_grad], lr=1e-3)
    losses = []
    for step in range(STEPS):
        rows = batch[2 * step % len(batch) :][:2]
        loss = adapted(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert sum(losses[-5:]) < sum(losses[:5])
    adapted.save_pretrained(place / "lora")
    return place / "lora"


@pytest.fixture(scope="module")
def merged(pruned: Path, lora: Path, place: Path) -> Path:
    bowline("merge", pruned, lora, place / "merged")
    return place / "merged"


def test_the_audit_says_beforehand_which_merges_are_exact(pruned: Path, lora: Path) -> None:
    evidence = audit_adapter(lora, base=pruned).evidence
    assert evidence.base.tied and evidence.alike
    peft, _, ours = evidence.merges
    assert (peft.exact, ours.exact, ours.tie_stays) == (False, True, True)


def test_the_merged_model_computes_what_the_adapter_model_computes(pruned: Path, lora: Path, merged: Path) -> None:
    ids = ids_of(merged)
    adapted = PeftModel.from_pretrained(causal(pruned), lora).eval()
    before = logits_of(adapted, ids)
    assert torch.allclose(logits_of(causal(merged), ids), before, rtol=0, atol=2e-4)
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] is True
    by_peft = adapted.merge_and_unload()
    assert (logits_of(by_peft, ids) - before).abs().max() > 0.01


@pytest.mark.parametrize(("dtype", "least"), [("int8", 0.998), ("int4", 0.98)])
def test_the_quantised_model_ranks_tokens_as_before(merged: Path, place: Path, dtype: str, least: float) -> None:
    out = place / dtype
    bowline("quantize", merged, out, "--dtype", dtype)
    ids = ids_of(merged)
    model = causal(merged)
    before = logits_of(model, ids)
    load_checkpoint(model, out)
    likeness = torch.nn.functional.cosine_similarity(logits_of(model, ids), before, dim=-1)
    assert likeness.min() > least


@needs_llama_cpp
def test_llama_cpp_says_the_same_sixteen_tokens(merged: Path, place: Path) -> None:
    output = bowline("export", merged, place / "small.gguf", "--to", "gguf")
    assert "no output.weight" in output
    ids = ids_of(merged)
    found = by_llama_cpp(place / "small.gguf", TEXT, 16, place)
    assert found["prompt"] == ids
    assert found["greedy"] == by_transformers(causal(merged), ids, 16)[0]
    assert (place / "small.gguf").stat().st_size < 1.02 * (merged / "model.safetensors").stat().st_size


def test_onnx_has_one_matrix_and_the_same_outputs(merged: Path, place: Path) -> None:
    output = bowline("export", merged, place / "small.onnx", "--to", "onnx")
    assert "verified: outputs differ by at most" in output
    found = re.search(r"(\d\.\d+) times one copy", output)
    assert found is not None and 0.98 < float(found[1]) < 1.02, output


def test_the_sizes_of_every_step(smollm2: Path, pruned: Path, merged: Path, place: Path) -> None:
    sizes = {
        one.name: sum(file.stat().st_size for file in one.glob("*.safetensors")) for one in (smollm2, pruned, merged)
    }
    for name in ("int8", "int4"):
        sizes[name] = sum(file.stat().st_size for file in (place / name).glob("*.safetensors"))
    sizes |= {file.name: file.stat().st_size for file in place.glob("small.*")}
    print({name: f"{size / 1e6:.1f} MB" for name, size in sizes.items()})  # noqa: T201
    assert sizes["pruned"] < 0.85 * sizes[smollm2.name]
    assert sizes["int4"] < sizes["int8"] < sizes["merged"] < 1.001 * sizes["pruned"]
