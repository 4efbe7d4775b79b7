"""What transformers' classes declare and what they share, against transformers' own answer, under both flags.

The sample has the first class of every fourth family, the best known ones, and every class whose declaration is a
pattern or computed.
`python -m tests.parity.test_declared_ties` does the same for every class that can be built.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("transformers")

import transformers
from tools.tiny import build, candidate_names, load_class, tiny_config

from bowline import TieState
from bowline.nn import check_ties, declared_ties, find_ties

pytestmark = pytest.mark.usefixtures("quiet_transformers")

SAMPLE = [
    "AfmoeForCausalLM",
    "AriaForConditionalGeneration",
    "AyaVisionForConditionalGeneration",
    "BartForConditionalGeneration",
    "BertForMaskedLM",
    "BertForPreTraining",
    "BioGptForCausalLM",
    "BlipForConditionalGeneration",
    "BridgeTowerForMaskedLM",
    "CodeGenForCausalLM",
    "Cohere2VisionForConditionalGeneration",
    "ConvBertForMaskedLM",
    "CwmForCausalLM",
    "DFineForObjectDetection",
    "DebertaForMaskedLM",
    "DebertaV2ForMaskedLM",
    "DeepseekV3ForCausalLM",
    "DeepseekVLHybridForConditionalGeneration",
    "Deimv2ForObjectDetection",
    "DiffusionGemmaModel",
    "DistilBertForMaskedLM",
    "Dots3NoteForCausalLM",
    "ErnieForCausalLM",
    "EsmForMaskedLM",
    "ExaoneMoeForCausalLM",
    "FastVlmForConditionalGeneration",
    "FlintForCausalLM",
    "FunAsrNanoForConditionalGeneration",
    "GPT2LMHeadModel",
    "GPTJForCausalLM",
    "GPTNeoForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3nForCausalLM",
    "Gemma4UnifiedForCausalLM",
    "Glm46VForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "GlmAsrForConditionalGeneration",
    "GraniteMoeForCausalLM",
    "GraniteSpeechForConditionalGeneration",
    "GroundingDinoForObjectDetection",
    "HYV4ForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "IBertForMaskedLM",
    "IdeficsForVisionText2Text",
    "InternVLForConditionalGeneration",
    "JetMoeForCausalLM",
    "Kosmos2ForConditionalGeneration",
    "LEDForConditionalGeneration",
    "Lfm3ForCausalLM",
    "Llama4ForCausalLM",
    "LlamaForCausalLM",
    "LlavaForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "LukeForMaskedLM",
    "MMGroundingDinoForObjectDetection",
    "MT5EncoderModel",
    "Mamba2ForCausalLM",
    "MarianMTModel",
    "MellumForCausalLM",
    "MiniCPMV4_6ForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "ModernBertDecoderForCausalLM",
    "MossTranscribeDiarizeForConditionalGeneration",
    "NemotronForCausalLM",
    "NystromformerForMaskedLM",
    "OlmoHybridForCausalLM",
    "Ovis2ForConditionalGeneration",
    "PLBartForCausalLM",
    "PPDocLayoutV3Model",
    "PegasusXForConditionalGeneration",
    "Phi3ForCausalLM",
    "QianfanOCRForConditionalGeneration",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "RTDetrV2ForObjectDetection",
    "RecurrentGemmaForCausalLM",
    "RoFormerForCausalLM",
    "SamHQModel",
    "SamModel",
    "SmolLM3ForCausalLM",
    "SpeechT5ForSpeechToText",
    "Step3p7ForConditionalGeneration",
    "T5ForConditionalGeneration",
    "T5Gemma2ForConditionalGeneration",
    "T5Gemma2Model",
    "UMT5ForConditionalGeneration",
    "UdopForConditionalGeneration",
    "UltrabertForMaskedLM",
    "VaultGemmaForCausalLM",
    "VipLlavaForConditionalGeneration",
    "WhisperForConditionalGeneration",
    "XGLMForCausalLM",
    "XLNetLMHeadModel",
    "ZambaForCausalLM",
]

Knots = set[frozenset[str]]


def knots(pairs: Iterable[tuple[str, str]]) -> Knots:
    """The connected sets of names."""
    found: list[set[str]] = []
    for pair in pairs:
        touched = [knot for knot in found if knot & set(pair)]
        found = [knot for knot in found if knot not in touched] + [set(pair).union(*touched)]
    return set(map(frozenset, found))


def flagged(name: str, flag: bool) -> Any:
    """A tiny model of the class, its root flag as given."""
    cls = load_class(name)
    config = tiny_config(cls)
    config.tie_word_embeddings = flag
    return build(cls, config)


def held(model: Any) -> Knots:
    """The names that are one parameter, by plain torch."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


def disagreements(model: Any) -> list[str]:
    """What Bowline says of the model that transformers or plain torch does not."""
    wanted = model.get_expanded_tied_weights_keys(all_submodels=True)
    declared, found = declared_ties(model), find_ties(model)
    pairs: dict[str, tuple[set[Any], set[Any]]] = {
        "targets": ({tie.target for tie in declared}, set(wanted)),
        "declared": (knots((tie.target, tie.source) for tie in declared), knots(wanted.items())),
        "shared": (knots((tie.target, tie.source) for tie in found), held(model)),
        "aliases": (set(found.aliases), set()),
        "states": ({check.state for check in check_ties(model).checks} - {TieState.SHARED}, set()),
    }
    return [
        f"{what}: {ours - theirs} and not {theirs - ours}" for what, (ours, theirs) in pairs.items() if ours != theirs
    ]


@pytest.mark.parametrize("flag", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", SAMPLE)
def test_what_is_declared_and_shared_is_what_transformers_says(name: str, flag: bool) -> None:
    assert disagreements(flagged(name, flag)) == []


def test_the_sample_has_eighty_architectures_and_some_that_tie() -> None:
    assert len(set(SAMPLE)) == len(SAMPLE) >= 80


def main() -> int:
    """Every class that can be built, under both flags; 0 when there is no disagreement."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    built = bad = 0
    left: dict[str, str] = {}
    for name in candidate_names():
        try:
            if not getattr(load_class(name), "_tied_weights_keys", None):
                continue
        except (LookupError, ImportError, RuntimeError):
            continue
        for flag in (True, False):
            try:
                model = flagged(name, flag)
            except Exception as error:  # a class that cannot be built tiny, whatever it raises
                left[name] = f"{type(error).__name__}: {error}".partition("\n")[0][:120]
                continue
            seen = disagreements(model)
            built, bad = built + 1, bad + bool(seen)
            for line in seen:
                sys.stdout.write(f"{name} {flag}: {line}\n")
    for name, reason in left.items():
        sys.stdout.write(f"not built: {name}: {reason}\n")
    sys.stdout.write(f"{built} models, {bad} disagreements\n")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
