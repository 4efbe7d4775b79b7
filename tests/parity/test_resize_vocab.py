"""A resized transformers model says of the old tokens what it said before, and survives its own save and load.

`python -m tests.parity.test_resize_vocab [CLASS ...]` does it for every class that has a vocabulary and can be run.
"""

from __future__ import annotations

import inspect
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from tools.tiny import VOCABULARY, build, config_from_dict, load_class, tiny_dict, written

from bowline.errors import BowlineError, TieError, UsageError
from bowline.families.transformers_table import load_table
from bowline.nn.vocabulary.axis_search import find_vocabulary
from bowline.nn.vocabulary.resize import VocabChange, resize_vocab

pytestmark = pytest.mark.usefixtures("quiet_transformers")

LOADER = f"transformers-{transformers.__version__.split('.')[0]}"
FLAG = "tie_word_embeddings"
LARGEST = 50_000_000
SPELLED_IDS = re.compile(r"token|_id$|_ids$|_index$")

Json = dict[str, Any]
Outputs = dict[str, torch.Tensor]


class NotRunError(Exception):
    """Why a class cannot be asked."""


# --- running one class -----------------------------------------------------------------------------------------------


def configured(cls: type[Any], tied: bool | None) -> Any:
    """A tiny config, with the flag at every level that has it."""
    content = tiny_dict(cls)
    if tied is not None:
        content[FLAG] = tied
        for level in _levels(content):
            if FLAG in level:
                level[FLAG] = tied
    config = config_from_dict(cls.config_class, content)
    if LOADER == "transformers-4":
        _restore_top_k(config)
    return config


def _restore_top_k(config: Any) -> None:
    """In version 4 a generation setting lives in every config, and a changed one is refused on save."""
    config.top_k = 50
    for value in vars(config).values():
        if isinstance(value, transformers.PretrainedConfig):
            _restore_top_k(value)


def _levels(node: Json) -> Iterator[Json]:
    yield node
    for value in node.values():
        if isinstance(value, dict):
            yield from _levels(value)


def special_ids(config: Any) -> set[int]:
    """Every small whole number that a config may mean as a token."""
    found: set[int] = set()
    for level in _levels(written(config)):
        for key, value in level.items():
            if SPELLED_IDS.search(key):
                found |= {one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)}
    return {one for one in found if 0 <= one < VOCABULARY}


def inputs(model: Any, ids: torch.Tensor) -> Json:
    """What the model's forward pass is asked with."""
    accepted = inspect.signature(model.forward).parameters
    asked: Json = {"input_ids": ids} if "input_ids" in accepted else {}
    if "decoder_input_ids" in accepted:
        asked["decoder_input_ids"] = ids
    generator = torch.Generator().manual_seed(7)
    config = model.config
    if "input_features" in accepted and "input_ids" not in accepted:
        length = 2 * getattr(config, "max_source_positions", 32)
        bins = getattr(config, "num_mel_bins", 0) or getattr(config, "input_feat_per_channel", 80)
        features = torch.randn(1, int(bins), length, generator=generator)
        asked["input_features"] = features.mT if "speech_to_text" in config.model_type else features
    if "pixel_values" in accepted and accepted["pixel_values"].default is inspect.Parameter.empty:
        asked["pixel_values"] = torch.randn(1, 3, 32, 32, generator=generator)
    return asked


def outputs(model: Any, ids: torch.Tensor) -> Outputs:
    """Every floating-point tensor that the model answers with; none from one that needs more than tokens."""
    if getattr(model, "mute", False):
        return {}
    torch.manual_seed(0)
    with torch.no_grad():
        answer = model(**inputs(model, ids), return_dict=True)
    return {
        key: value for key, value in answer.items() if isinstance(value, torch.Tensor) and value.is_floating_point()
    }


def assert_same_answers(before: Outputs, after: Outputs, change: VocabChange) -> None:
    """Each answer about the kept tokens is the one from before; anything else is as it was."""
    assert before.keys() == after.keys()
    for key, old in before.items():
        new = after[key]
        assert torch.isfinite(old).all() or not torch.isfinite(new).all(), key
        if old.shape[-1] != new.shape[-1]:
            missing = change.old_size - old.shape[-1]  # ImageGPT's head has one row less
            assert new.shape[-1] == change.new_size - missing, key
            kept = change.kept[(change.kept < old.shape[-1]) & (change.remap[change.kept] < new.shape[-1])]
            old, new = old[..., kept], new[..., change.remap[kept]]
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5, equal_nan=True, msg=partial(_named, key))


def _named(key: str, message: str) -> str:
    return f"{key}: {message}"


def assert_survives(cls: type[Any], model: Any, ids: torch.Tensor, directory: Path) -> None:
    """What is saved is loaded, every tensor of it, with the same sizes and the same answers."""
    model.save_pretrained(directory)
    loaded, info = cls.from_pretrained(directory, output_loading_info=True)
    assert not info["mismatched_keys"], info["mismatched_keys"]
    assert not info["missing_keys"], info["missing_keys"]
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in loaded.state_dict().items()} == shapes
    for key, value in outputs(model, ids).items():
        torch.testing.assert_close(outputs(loaded.eval(), ids)[key], value, rtol=1e-4, atol=1e-5, equal_nan=True)


def shared(model: Any) -> set[frozenset[str]]:
    """The groups of names that are one parameter."""
    groups: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(name)
    return {frozenset(group) for group in groups.values() if len(group) > 1}


def run(name: str, tied: bool | None, workspace: Path) -> bool:
    """Resize one class up, to a multiple, and down to a list; returns whether its answers could be compared."""
    try:
        cls = load_class(name)
        config = configured(cls, tied)
        model = build(cls, config)
        if sum(parameter.numel() for parameter in model.parameters()) > LARGEST:
            raise NotRunError("not tiny")
        special = special_ids(config)
        ordinary = [one for one in range(100, 250) if one not in special]
        ids = torch.tensor([ordinary[3:120:15]])
        model.save_pretrained(workspace / "unchanged")
        model = cls.from_pretrained(workspace / "unchanged").eval()  # tables that are computed have their values now
        try:
            before = outputs(model, ids)
        except Exception:  # it wants pictures, or its config was shrunk too far: shapes and files say the rest
            before, cls.mute = {}, True
        assert_survives(cls, model, ids, workspace / "unchanged")
    except (Exception, AssertionError) as error:  # whatever a class raises untouched is why it is not asked
        raise NotRunError(_one_line(error)) from None
    size = find_vocabulary(model).size
    if size < 250:
        raise NotRunError(f"only {size} tokens")
    identity = {key: id(one) for key, one in model.named_parameters()}
    ties = shared(model)

    change = resize_vocab(model, size + 7)
    assert_same_answers(before, outputs(model, ids), change)
    assert_survives(cls, model, ids, workspace / "longer")
    assert {key: id(one) for key, one in model.named_parameters()} == identity
    assert shared(model) == ties
    outputs(model, torch.full_like(ids, change.old_size + 3))  # the new tokens are tokens
    resize_vocab(model, change.old_size)
    assert_same_answers(before, outputs(model, ids), change)

    change = resize_vocab(model, change.old_size, pad_to_multiple_of=8, new_rows="gaussian")
    assert change.new_size % 8 == 0
    assert_same_answers(before, outputs(model, ids), change)
    resize_vocab(model, change.old_size)

    generator = torch.Generator().manual_seed(1)
    rest = (torch.randperm(change.old_size - 64, generator=generator) + 64).tolist()
    needed, last = special | set(ids.flatten().tolist()), int(ids.max())  # CLIP pools where the largest id stands
    keep = [*range(64), *(one for at, one in enumerate(rest) if (at % 3 == 0 or one in needed) and one != last), last]
    change = resize_vocab(model, keep)
    assert_same_answers(before, outputs(model, change.remap[ids]), change)
    assert_survives(cls, model, change.remap[ids], workspace / "shorter")
    assert shared(model) == ties
    return not getattr(cls, "mute", False)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# --- the sample ------------------------------------------------------------------------------------------------------

CLASSES = [
    "AlbertForMaskedLM",
    "BartForConditionalGeneration",
    "BertForMaskedLM",
    "BertForPreTraining",
    "BertModel",
    "BigBirdForMaskedLM",
    "BigBirdPegasusForConditionalGeneration",
    "BlenderbotForConditionalGeneration",
    "BloomForCausalLM",
    "CamembertForMaskedLM",
    "CohereForCausalLM",
    "ConvBertForMaskedLM",
    "CpmAntForCausalLM",
    "CTRLLMHeadModel",
    "DebertaV2ForMaskedLM",
    "DistilBertForMaskedLM",
    "ElectraForMaskedLM",
    "FalconForCausalLM",
    "FNetForMaskedLM",
    "FSMTForConditionalGeneration",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "GPTNeoForCausalLM",
    "GPTNeoXForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3nForCausalLM",
    "IBertForMaskedLM",
    "ImageGPTForCausalImageModeling",
    "LEDForConditionalGeneration",
    "LlamaForCausalLM",
    "LlamaForSequenceClassification",
    "LlavaForConditionalGeneration",
    "LukeForMaskedLM",
    "M2M100ForConditionalGeneration",
    "MBartForConditionalGeneration",
    "MPNetForMaskedLM",
    "MT5ForConditionalGeneration",
    "MambaForCausalLM",
    "MarianMTModel",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "MllamaForConditionalGeneration",
    "MobileBertForMaskedLM",
    "MobileBertForPreTraining",
    "ModernBertForMaskedLM",
    "MoshiForCausalLM",
    "MptForCausalLM",
    "OPTForCausalLM",
    "OpenAIGPTLMHeadModel",
    "PLBartForConditionalGeneration",
    "PegasusForConditionalGeneration",
    "PerceiverForMaskedLM",
    "PhiForCausalLM",
    "ProphetNetForConditionalGeneration",
    "Qwen2ForCausalLM",
    "RemBertForMaskedLM",
    "RoCBertForMaskedLM",
    "RobertaForMaskedLM",
    "RoFormerForMaskedLM",
    "RwkvForCausalLM",
    "SqueezeBertForMaskedLM",
    "T5EncoderModel",
    "T5ForConditionalGeneration",
    "T5GemmaForConditionalGeneration",
    "UMT5ForConditionalGeneration",
    "WhisperForConditionalGeneration",
    "XGLMForCausalLM",
    "XLMWithLMHeadModel",
    "XLNetLMHeadModel",
]


@pytest.mark.parametrize("name", CLASSES)
def test_old_tokens_say_what_they_said_and_the_save_loads(name: str, tmp_path: Path) -> None:
    for tied in (True, False) if has_ties(name) else (None,):
        assert run(name, tied, tmp_path / str(tied))


def test_a_trained_head_beside_a_true_flag_is_kept_where_transformers_loses_it() -> None:
    def diverged() -> Any:
        model = build(load_class("GPT2LMHeadModel"))
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 3 + 1)
        return model

    head = diverged().lm_head.weight.detach()
    theirs, ours = diverged(), diverged()
    theirs.resize_token_embeddings(VOCABULARY + 7)
    resize_vocab(ours, VOCABULARY + 7)
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    assert torch.equal(ours.lm_head.weight[:VOCABULARY], head)
    assert torch.equal(ours.transformer.wte.weight[:VOCABULARY], diverged().transformer.wte.weight)


def test_rows_past_the_vocabulary_stay_past_it_and_the_config_follows() -> None:
    config = configured(load_class("MllamaForCausalLM"), None)
    config.image_token_index = VOCABULARY  # as the released models have it: the first of eight rows past the words
    model = build(load_class("MllamaForCausalLM"), config)
    table = model.model.embed_tokens.weight.detach().clone()
    assert len(table) == VOCABULARY + 8
    change = resize_vocab(model, VOCABULARY + 7)
    assert torch.equal(model.model.embed_tokens.weight[VOCABULARY + 7 :], table[VOCABULARY:])
    assert model.lm_head.out_features == model.config.vocab_size == VOCABULARY + 7
    assert model.config.image_token_index == int(change.remap[VOCABULARY]) == VOCABULARY + 7


def test_every_config_level_that_counts_these_tokens_follows_and_no_other() -> None:
    t5, llava = (build(load_class(f"{family}ForConditionalGeneration")) for family in ("T5", "Llava"))
    resize_vocab(t5, VOCABULARY + 7)
    assert t5.config.vocab_size == t5.encoder.config.vocab_size == t5.decoder.config.vocab_size == VOCABULARY + 7
    resize_vocab(llava, VOCABULARY + 7)
    assert llava.config.text_config.vocab_size == llava.model.language_model.config.vocab_size == VOCABULARY + 7
    blip = build(load_class("InstructBlipForConditionalGeneration"))
    resize_vocab(blip, VOCABULARY + 7)
    assert blip.config.text_config.vocab_size == VOCABULARY + 7
    assert blip.config.qformer_config.vocab_size == VOCABULARY
    assert blip.qformer.embeddings.word_embeddings.num_embeddings == VOCABULARY


def test_special_ids_move_with_their_tokens_in_both_configs() -> None:
    model = build(load_class("BartForConditionalGeneration"))
    model.generation_config.eos_token_id = [2, 5]
    resize_vocab(model, [1, 0, 5, 2, 7])
    assert (model.config.pad_token_id, model.config.bos_token_id, model.config.eos_token_id) == (0, 1, 3)
    assert model.generation_config.eos_token_id == [3, 2]
    assert model.model.shared.padding_idx == model.model.decoder.padding_idx == 0


def test_a_model_that_hashes_token_ids_does_not_let_them_move() -> None:
    model = build(load_class("BltForCausalLM"))
    with pytest.raises(UsageError, match="hashes token ids"):
        resize_vocab(model, [1, 0])
    change = resize_vocab(model, 300)
    assert model.config.patcher_config.vocab_size == model.config.vocab_size == 300
    assert {"model.patcher.embed_tokens.weight", "model.patcher.lm_head.weight"} <= set(change.tensors)


def test_two_vocabularies_in_one_model_are_refused_until_one_is_named() -> None:
    model = build(load_class("CsmForConditionalGeneration"))
    with pytest.raises(TieError, match=r"several vocabularies.*embed_text_tokens\.weight"):
        resize_vocab(model, VOCABULARY + 7)
    change = resize_vocab(model, VOCABULARY + 7, axes={"embed_text_tokens.weight": 0})
    assert change.tensors == ("embed_text_tokens.weight",)
    assert (model.config.text_vocab_size, model.config.vocab_size) == (VOCABULARY + 7, VOCABULARY)


def test_a_module_around_a_transformers_model_is_resized_through_it() -> None:
    inner = build(load_class("BertModel"))
    wrapper = torch.nn.ModuleDict({"bert": inner, "head": torch.nn.Linear(32, VOCABULARY)})
    wrapper["head"].weight = inner.embeddings.word_embeddings.weight
    change = resize_vocab(wrapper, VOCABULARY + 7)
    assert set(change.tensors) == {"bert.embeddings.word_embeddings.weight", "head.weight", "head.bias"}
    assert inner.config.vocab_size == VOCABULARY + 7


def test_adapters_elsewhere_do_not_matter_and_one_on_the_table_is_refused() -> None:
    peft = pytest.importorskip("peft")
    elsewhere = peft.get_peft_model(build(load_class("GPT2LMHeadModel")), peft.LoraConfig(target_modules=["c_attn"]))
    resize_vocab(elsewhere, VOCABULARY + 7)
    assert len(elsewhere.base_model.model.lm_head.weight) == elsewhere.config.vocab_size == VOCABULARY + 7
    on_it = peft.get_peft_model(build(load_class("GPT2LMHeadModel")), peft.LoraConfig(target_modules=["wte"]))
    with pytest.raises(TieError, match=r"transformer\.wte\.weight"):
        resize_vocab(on_it, VOCABULARY + 7)


def test_an_untied_encoder_decoder_of_two_models_is_refused_and_its_decoder_is_not() -> None:
    encoder, decoder = build(load_class("BertModel")), build(load_class("GPT2LMHeadModel"))
    pair: Any = transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder)
    with pytest.raises(TieError, match="two vocabularies"):
        resize_vocab(pair, VOCABULARY + 7)
    resize_vocab(pair.decoder, VOCABULARY + 7)
    assert pair.config.decoder.vocab_size == VOCABULARY + 7
    assert pair.config.encoder.vocab_size == VOCABULARY


# --- the full run ----------------------------------------------------------------------------------------------------


def classes() -> list[str]:
    """The classes of the table that have a vocabulary in this version."""
    table = load_table()
    found = []
    for name in table:
        architecture = table.architecture(name)
        declared = architecture.declared.get(LOADER) if architecture else None
        if declared is not None and declared.vocabulary:
            found.append(name)
    return found


def has_ties(name: str) -> bool:
    architecture = load_table().architecture(name)
    assert architecture is not None
    return bool(architecture.declared[LOADER].ties)


def main(names: list[str]) -> int:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    started, counts = time.monotonic(), {"agree": 0, "shapes agree": 0, "refused": 0, "fail": 0, "not run": 0}
    names, tieable = names or classes(), {name for name in classes() if has_ties(name)}
    for at, name in enumerate(names, 1):
        for tied in (True, False) if name in tieable else (None,):
            with tempfile.TemporaryDirectory() as workspace:
                try:
                    word, why = ("agree" if run(name, tied, Path(workspace)) else "shapes agree"), ""
                except NotRunError as error:
                    word, why = "not run", str(error)
                except BowlineError as error:
                    word, why = "refused", str(error)
                except (Exception, AssertionError) as error:
                    word, why = "fail", _one_line(error)
            counts[word] += 1
            if word != "agree":
                sys.stdout.write(f"[{at}/{len(names)}] {name} tied={tied}: {word} {why}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{transformers.__version__}: {counts}, {time.monotonic() - started:.0f} s\n")
    return 1 if counts["fail"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
