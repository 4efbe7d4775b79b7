"""Losses of other libraries: their arguments, refusals, and the real libraries if they run on a CPU."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bowline.errors import UsageError
from bowline.functional.loss import chosen_backend, linear_cross_entropy, peer_backends

ROOT = Path(__file__).parents[3]
NAMES = ["liger", "quack", "cut_cross_entropy"]
SIGNATURES = {
    # liger-kernel 0.8.5
    "liger": """input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0,
        label_smoothing=0.0, reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None,
        use_token_scaling=False, return_token_accuracy=False, return_predicted_tokens=False, chunk_mem_const=1""",
    # quack-kernels 0.6.5
    "quack": """input, weight, target, chunk_size=4096, ignore_index=-100, reduction="mean", tuned=True,
        use_scaled_exp=None""",
    # cut-cross-entropy 25.1.1
    "cut_cross_entropy": """input, weight, target, ignore_index=-100, softcap=None, reduction="mean", shift=False,
        filter_eps="high", impl="cce\"""",
}
FAKE = """
from torch.nn import functional as F

calls = []

def {name}({signature}):
    calls.append(dict(locals()))
    bias = calls[-1].get("bias")
    return F.cross_entropy(F.linear(input, weight, bias), target, ignore_index=ignore_index, reduction=reduction)
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules with the real names and signatures, which compute torch's loss and note what they were given."""
    made = set()
    for name in NAMES:
        peer = peer_backends.PEERS[name]
        *folders, module = peer.module.split(".")
        made.add(peer.module.partition(".")[0])
        folder = tmp_path.joinpath(*folders) if folders else tmp_path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{module}.py").write_text(FAKE.format(name=peer.function, signature=SIGNATURES[name]))
        monkeypatch.setitem(peer_backends.PEERS, name, replace(peer, dtypes=lambda _: (torch.float32, torch.bfloat16)))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for loaded in [one for one in sys.modules if one.partition(".")[0] in made]:
        del sys.modules[loaded]


def ends(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Multiples of 8 of everything; two positions without a label."""
    torch.manual_seed(0)
    labels = torch.randint(0, 16, (2, 4))
    labels[0, :2] = -100
    hidden, weight = (torch.randn(*shape).to(dtype).requires_grad_() for shape in ((2, 4, 8), (16, 8)))
    return hidden, weight, labels


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [2, 8])
def test_loss_and_gradients_come_through_and_are_0_without_labels(name: str, reduction: Any, ignored: int) -> None:
    if (name, reduction, ignored) == ("liger", "mean", 8):
        pytest.skip("torch's own, which stands in for it, makes that NaN; the real one 0")
    hidden, weight, labels = ends()
    labels.view(-1)[:ignored] = -100
    found = []
    for backend in (name, "reference"):
        loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction, backend=backend)
        found.append([loss, *torch.autograd.grad(loss, (hidden, weight))])
    torch.testing.assert_close(*found)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        (
            "liger",
            {"bias": torch.zeros(16), "softcap": 3.0, "z_loss": 0.01, "label_smoothing": 0.1, "ignore_index": -1},
            {"softcap": 3.0, "lse_square_scale": 0.01, "label_smoothing": 0.1, "ignore_index": -1, "reduction": "mean"},
        ),
        ("liger", {"reduction": "sum"}, {"accum_dtype": torch.float32, "reduction": "sum", "bias": None}),
        ("quack", {"ignore_index": -1}, {"ignore_index": -1, "reduction": "sum"}),
        ("cut_cross_entropy", {"softcap": 3.0}, {"softcap": 3.0, "reduction": "sum", "impl": "torch_compile"}),
        ("cut_cross_entropy", {"reduction": "none"}, {"reduction": "none", "softcap": None}),
    ],
)
def test_options_are_given_under_their_names(name: str, options: dict[str, Any], expected: dict[str, Any]) -> None:
    hidden, weight, labels = ends()
    if "ignore_index" in options:
        labels = labels.masked_fill(labels == -100, -1)
    loss = linear_cross_entropy(hidden, weight, labels, backend=name, **options)
    (given,) = importlib.import_module(peer_backends.PEERS[name].module).calls
    assert given["input"].shape == (8, 8) and given["target"].shape == (8,)
    assert {key: given[key] for key in expected} == expected
    assert loss.shape == (labels.shape if options.get("reduction") == "none" else ())


@pytest.mark.usefixtures("fakes")
def test_a_loss_in_half_precision_is_given_in_float32() -> None:
    assert linear_cross_entropy(*ends(torch.bfloat16), backend="quack").dtype == torch.float32


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("liger", {"mask_ids": [15]}, "'liger' with mask_ids: liger-kernel has no such option"),
        ("liger", {"logit_scale": 0.5}, "with logit_scale"),
        ("liger", {"class_weight": torch.ones(16)}, "with class_weight"),
        ("liger", {"reduction": "none"}, "with reduction='none'"),
        ("liger", {"return_logits": True}, "with return_logits"),
        ("quack", {"bias": torch.zeros(16)}, "'quack' with bias: quack-kernels has no such option .*backend=\"auto\""),
        ("quack", {"softcap": 2.0}, "with softcap"),
        ("quack", {"weight": torch.zeros(17, 8)}, r"for N, V, D = \(8, 17, 8\): expected multiples of 8"),
        ("cut_cross_entropy", {"z_loss": 0.1}, "with z_loss"),
        ("cut_cross_entropy", {"label_smoothing": 0.1}, "with label_smoothing"),
        ("cut_cross_entropy", {"return_lse": True}, "with return_lse"),
        (
            "cut_cross_entropy",
            {"hidden": torch.zeros(2, 4, 8).double(), "weight": torch.zeros(16, 8).double()},
            r"hidden of torch.float64: expected torch.float32",
        ),
    ],
)
def test_what_a_library_does_not_take_is_refused(name: str, change: dict[str, Any], words: str) -> None:
    hidden, weight, labels = ends()
    with pytest.raises(UsageError, match=words):
        linear_cross_entropy(**{"hidden": hidden, "weight": weight, "labels": labels, "backend": name, **change})


@pytest.mark.usefixtures("fakes")
def test_the_number_of_tokens_and_the_dtype_of_the_matrix_count_too() -> None:
    hidden, weight, labels = ends()
    with pytest.raises(UsageError, match=r"for N, V, D = \(6, 16, 8\): expected multiples of 8"):
        linear_cross_entropy(hidden[:, :3], weight, labels[:, :3], backend="quack")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UsageError, match=r"with weight of torch\.float64"):
        linear_cross_entropy(hidden, weight.double(), labels, backend="quack")


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("liger", torch.float32, "'liger' on cpu: expected a GPU"),
        ("quack", torch.bfloat16, "'quack' on cpu: expected a GPU"),
        ("cut_cross_entropy", torch.float32, "needs cut-cross-entropy, which is not installed .*pip install"),
    ],
)
def test_where_it_cannot_run_the_way_out_is_said(name: str, dtype: torch.dtype, words: str) -> None:
    if importlib.util.find_spec("cut_cross_entropy"):
        pytest.skip("cut-cross-entropy is installed here")
    with pytest.raises(UsageError, match=words):
        linear_cross_entropy(*ends(dtype), backend=name)


@pytest.mark.parametrize("name", NAMES)
def test_none_is_chosen_unasked_and_without_tokens_none_is_called(name: str) -> None:
    hidden, weight = torch.empty(4096, 8), torch.empty(8192, 8)
    assert chosen_backend(hidden, weight, backend=name) == name
    assert chosen_backend(hidden, weight) == "chunked"
    assert chosen_backend(hidden[:0], weight, backend=name) == "reference"
    assert linear_cross_entropy(hidden[:0], weight, torch.empty(0, dtype=torch.long), backend=name).item() == 0


# --- the real ones ----------------------------------------------------------------------------------------------------

REAL = """
import sys, torch
from bowline.functional.loss import linear_cross_entropy

name, options = sys.argv[1], eval(sys.argv[2])
torch.manual_seed(0)
hidden, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((2, 5, 8), (19, 8), (19,)))
leaves = [hidden, weight, *([bias] if options.pop("bias", False) else [])]
if len(leaves) == 3:
    options["bias"] = bias
labels = torch.randint(0, 19, (2, 5))
for ignored in (3, 10):
    labels.view(-1)[:ignored] = -100
    found = []
    for backend in (name, "reference"):
        loss = linear_cross_entropy(hidden, weight, labels, backend=backend, **options)
        found.append([loss, *torch.autograd.grad(loss.sum(), leaves)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
print("the same")
"""


def real(name: str, folder: str, options: str, **environment: str) -> None:
    """In a process of its own: what is there changes what others import."""
    places = [ROOT / ".peers" / one for one in ("triton", folder)]
    for place in places:
        if not place.is_dir():
            pytest.skip(f"{place.name} is not unpacked in .peers/{place.name}: see the Makefile")
    path = os.pathsep.join(map(str, (*places, ROOT / "src")))
    done = subprocess.run(
        [sys.executable, "-c", REAL, name, options],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.endswith("the same\n"), done.stderr


@pytest.mark.parametrize("options", ["{'softcap': 3.0}", "{'reduction': 'none'}"])
def test_cut_cross_entropy_computes_the_same(options: str) -> None:
    real("cut_cross_entropy", "cut-cross-entropy", options, TORCHDYNAMO_DISABLE="1")  # its compilation takes a minute


def test_liger_interpreted_computes_the_same() -> None:
    options = "{'bias': True, 'z_loss': 0.01, 'label_smoothing': 0.1}"  # it does not interpret a softcap
    real("liger", "liger-kernel", options, TRITON_INTERPRET="1")
