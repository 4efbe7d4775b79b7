"""Tiny models of transformers' classes through Bowline's files: tied, untied and tied again, against `from_pretrained`.

Each class goes through three states. Tied, as it is built. Untied by `untie_weights` and its head trained apart. Built
untied and tied by `tie_weights`. In each, what `save_checkpoint` wrote gives transformers every tensor and the logits
bit for bit, ties included, and an audit has nothing to say; `load_checkpoint` onto a model on meta gives the same, from
Bowline's files and from those of `save_pretrained`.
`python -m tests.parity.test_live_checkpoints [PART PARTS]` does the same for every class that declares a tie.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from tools.tiny import build, candidate_names, load_class, tiny_config

from bowline.auditing import Severity, audit
from bowline.nn import (
    check_ties,
    declared_ties,
    find_ties,
    load_checkpoint,
    save_checkpoint,
    tie_weights,
    untie_weights,
)
from bowline.nn.config.head_scaling import head_scale

pytestmark = pytest.mark.usefixtures("quiet_transformers")

State = dict[str, torch.Tensor]

SAMPLE = [
    "AlbertForMaskedLM",
    "ApertusForCausalLM",
    "BambaForCausalLM",
    "BartForConditionalGeneration",
    "BertForMaskedLM",
    "BigBirdForMaskedLM",
    "BioGptForCausalLM",
    "BlenderbotForConditionalGeneration",
    "BlipForConditionalGeneration",
    "BloomForCausalLM",
    "CTRLLMHeadModel",
    "CodeGenForCausalLM",
    "CohereForCausalLM",
    "DebertaV2ForMaskedLM",
    "DeepseekV3ForCausalLM",
    "DistilBertForMaskedLM",
    "ElectraForMaskedLM",
    "EsmForMaskedLM",
    "FalconForCausalLM",
    "FlaubertWithLMHeadModel",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "GPTJForCausalLM",
    "GPTNeoForCausalLM",
    "GPTNeoXForCausalLM",
    "Gemma2ForCausalLM",
    "GemmaForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "JambaForCausalLM",
    "LEDForConditionalGeneration",
    "Llama4ForCausalLM",
    "LlamaForCausalLM",
    "LlavaForConditionalGeneration",
    "LongT5ForConditionalGeneration",
    "LxmertForPreTraining",
    "M2M100ForConditionalGeneration",
    "MBartForConditionalGeneration",
    "MPNetForMaskedLM",
    "MT5ForConditionalGeneration",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "MobileBertForMaskedLM",
    "ModernBertForMaskedLM",
    "MptForCausalLM",
    "NemotronForCausalLM",
    "OPTForCausalLM",
    "OlmoForCausalLM",
    "PaliGemmaForConditionalGeneration",
    "PegasusForConditionalGeneration",
    "PersimmonForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "ProphetNetForConditionalGeneration",
    "Qwen2ForCausalLM",
    "Qwen2VLForConditionalGeneration",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "RecurrentGemmaForCausalLM",
    "RoFormerForMaskedLM",
    "RobertaForMaskedLM",
    "RwkvForCausalLM",
    "SmolLM3ForCausalLM",
    "Speech2TextForConditionalGeneration",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
    "SwitchTransformersForConditionalGeneration",
    "T5ForConditionalGeneration",
    "UMT5ForConditionalGeneration",
    "UdopForConditionalGeneration",
    "ViltForMaskedLM",
    "WhisperForConditionalGeneration",
    "XLMRobertaForMaskedLM",
    "XLMWithLMHeadModel",
    "XLNetLMHeadModel",
]

FORCED_AT_LOAD = {"umt5"}
"""The config makes the flag true at every load, and `forward` asks it: built untied, it is another model in a file."""

KNOWN = {
    "DabDetrForObjectDetection": "not built: needs timm",
    "DbrxForCausalLM": "not built: its config refuses the flag",
    "DeformableDetrForObjectDetection": "not built: needs timm",
    "Gemma4AssistantForCausalLM": "not built: shares the caches of another model",
    "Gemma4UnifiedAssistantForCausalLM": "not built: shares the caches of another model",
    "ImageGPTForCausalImageModeling": "its tie makes the head one row longer than a head of its own may be",
    "KyutaiSpeechToTextForConditionalGeneration": "its tie makes the head one row longer than a head of its own may be",
    "LukeForMaskedLM": "transformers 5 leaves its head untied under a true flag; an audit says so",
    "MarianMTModel": "its positions are parameters that are computed and not stored, and here they are random",
    "PeAudioVideoModel": "not built: needs timm",
    "Pix2StructTextModel": "not built: its config lacks a key of its own class",
    "Pop2PianoForConditionalGeneration": "transformers 5 leaves its head untied under a true flag; an audit says so",
    "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration": "not built: has no table of the name it declares",
    "Qwen3OmniMoeTalkerForConditionalGeneration": "not built: its config lacks a key of its own class",
    "Qwen3_5MoeForConditionalGeneration": "its experts round by how memory is aligned, in any loaded copy (1e-7)",
    "VisualBertForRegionToPhraseAlignment": "transformers 4 does not tie its head: written twice, as audits say",
    "VibeVoiceForConditionalGeneration": "save_pretrained leaves the head out and then the flag; the load is refused",
}
"""Why copies of these classes' models differ, or cannot be had; not for any reason that a file could mend."""


def inputs(model: Any) -> dict[str, torch.Tensor]:
    ids = torch.arange(14).reshape(2, 7) + 100
    asked = {"input_ids": ids}
    return asked | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})


def logits(model: Any) -> torch.Tensor | None:
    """What the model makes of a few tokens; `None` where it wants more than tokens."""
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            answer = model(**inputs(model))
    except Exception:  # pictures, sound: the tensors say the rest
        return None
    found = [answer.get(key) for key in ("logits", "prediction_logits")]
    return next((value for value in found if isinstance(value, torch.Tensor)), None)


def same(one: torch.Tensor | None, other: torch.Tensor | None, tolerance: float = 0.0) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape:
        return False
    return bool(torch.isclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True).all())


class Original:
    """A live model's numbers and ties, which every copy of it must have."""

    def __init__(self, model: Any) -> None:
        self.state: State = {name: value.clone() for name, value in model.state_dict().items()}
        self.ties = set(find_ties(model).ties)
        self.logits = logits(model)

    def disagreements(self, copied: Any) -> Iterator[str]:
        state = copied.state_dict()
        differing = sorted(
            name
            for name in self.state.keys() | state.keys()
            if not (name in self.state and name in state and same(self.state[name], state[name]))
        )
        if differing:
            yield f"tensors differ: {', '.join(differing[:4])}"
        if set(find_ties(copied).ties) != self.ties:
            yield f"ties are {sorted(map(str, find_ties(copied).ties))}, were {sorted(map(str, self.ties))}"
        if not same(logits(copied), self.logits):
            yield "logits differ"


def copies(cls: type[Any], model: Any, directory: Path, tied: bool) -> Iterator[tuple[str, Any]]:
    """The model through every pair of a writer and a reader, and what an audit says of the files."""
    save_checkpoint(model, directory / "ours")
    found = [finding for finding in audit(directory / "ours").findings if finding.severity is not Severity.INFO]
    yield "audit", [f"{finding.code} {finding.message}" for finding in found]
    loaded, info = cls.from_pretrained(directory / "ours", dtype=torch.float32, output_loading_info=True)
    yield "report", [f"{kind}: {names}" for kind, names in info.items() if names and kind != "unexpected_keys"]
    yield "from_pretrained", loaded.eval()
    yield "load_checkpoint", read(cls, directory / "ours", tied)
    model.save_pretrained(directory / "theirs")
    yield "load_checkpoint of save_pretrained", read(cls, directory / "theirs", tied)


def read(cls: type[Any], directory: Path, tied: bool) -> Any:
    """A model on meta, loaded. One that is untied may be built tied, because its config forces the flag (T5)."""
    config = cls.config_class.from_pretrained(directory)
    config.dtype = torch.float32  # as text, which it is in the file, some classes cannot use it
    with torch.device("meta"):
        model = cls(config).eval()
    load_checkpoint(model, directory, on_conflict="raise" if tied else "untie")
    return model


def through_files(cls: type[Any], model: Any, state: str) -> Iterator[str]:
    original = Original(model)
    with tempfile.TemporaryDirectory() as directory:
        for how, copied in copies(cls, model, Path(directory), state != "untied"):
            lines = copied if isinstance(copied, list) else original.disagreements(copied)
            yield from (f"{state}, {how}: {line}" for line in lines)


def built(cls: type[Any], flag: bool) -> Any:
    config = tiny_config(cls)
    config.tie_word_embeddings = flag
    return build(cls, config)


def train_apart(model: Any) -> int:
    """Move every weight that was a tie's target away from its source; returns how many there were."""
    moved = 0
    with torch.no_grad():
        for tie in declared_ties(model, flag=True):
            target, source = model.get_parameter(tie.target), model.get_parameter(tie.source)
            if target is not source and target.ndim > 1:
                target.add_(torch.randn(target.shape, generator=torch.Generator().manual_seed(1)) * 0.01)
                moved += 1
    return moved


def disagreements(cls: type[Any], *, seen: dict[str, int] | None = None) -> Iterator[str]:
    """Every way in which a copy of a model of this class is another model."""
    seen = {} if seen is None else seen
    model = built(cls, flag=True)
    if not declared_ties(model):
        return
    seen["models"] = seen.get("models", 0) + 1
    before = logits(model)
    seen["with logits"] = seen.get("with logits", 0) + (before is not None)
    if not check_ties(model):
        yield f"built: {check_ties(model)}"
    yield from through_files(cls, model, "tied")

    scaled = head_scale(model) != 1.0
    if untie_weights(model):
        if not same(before, logits(model), 1e-4 if scaled else 0.0):
            yield "untied: the logits changed"
        if train_apart(model):
            if before is not None and same(before, logits(model)):
                yield "untied: the head that was trained is not the one that is used"
            yield from through_files(cls, model, "untied")
            seen["untied"] = seen.get("untied", 0) + 1

    if cls.config_class.model_type not in FORCED_AT_LOAD:
        model = built(cls, flag=False)
        tie_weights(model, on_conflict="source")
        yield from through_files(cls, model, "tied again")
        seen["tied again"] = seen.get("tied again", 0) + 1


@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_is_the_same_through_files_tied_untied_and_tied_again(name: str) -> None:
    assert list(disagreements(load_class(name))) == []


def test_the_sample_holds_sixty_architectures_that_exist() -> None:
    families = {load_class(name).config_class.model_type for name in SAMPLE}
    assert len(families) >= 60


def tying_classes() -> Iterator[type[Any]]:
    for name in candidate_names():
        try:
            cls = load_class(name)
        except (LookupError, ImportError, RuntimeError):
            continue
        if getattr(cls, "_tied_weights_keys", None):
            yield cls


def main(part: int = 0, parts: int = 1) -> int:
    """Every class that declares a tie; disagreements, one a line, and how many models there were."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    seen: dict[str, int] = {}
    bad = 0
    for at, cls in enumerate(tying_classes()):
        if at % parts != part:
            continue
        started = time.monotonic()
        try:
            lines = list(disagreements(cls, seen=seen))
        except Exception as error:  # whatever a class raises, the others have their turn
            lines = [f"{type(error).__name__}: {error}".replace("\n", " ")[:200]]
        known = KNOWN.get(cls.__name__)
        bad += bool(lines) and known is None
        lines = [f"known ({known}): {line}" if known else line for line in lines]
        for line in lines or ["agrees"]:
            sys.stdout.write(f"{cls.__name__} [{time.monotonic() - started:.1f} s] {line}\n")
        sys.stdout.flush()
    sys.stdout.write(f"transformers {transformers.__version__}: {seen}, {bad} classes disagree that are not known to\n")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main(*(int(word) for word in sys.argv[1:3])))
