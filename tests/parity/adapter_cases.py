"""Adapters of tiny tied models: every kind at every end, as PEFT saves them, and what merges make of them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, TrainableTokensConfig, get_peft_model

ROWS, WIDTH = 24, 8
IDS = torch.arange(ROWS).reshape(3, 8)
SIZES: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": WIDTH,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def llama(tied: bool) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied))


def gemma(tied: bool) -> Any:
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SIZES, head_dim=4, tie_word_embeddings=tied))


def gpt2(tied: bool) -> Any:
    config = transformers.GPT2Config(
        vocab_size=ROWS,
        n_embd=WIDTH,
        n_layer=1,
        n_head=2,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=tied,
    )
    return transformers.GPT2LMHeadModel(config)


def bert(tied: bool) -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, tie_word_embeddings=tied))


def t5(tied: bool) -> Any:
    sizes: dict[str, Any] = {"d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    assert tied
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=ROWS, d_model=WIDTH, **sizes))


BUILD = {"llama": llama, "gemma": gemma, "gpt2": gpt2, "bert": bert, "t5": t5}


@dataclass(frozen=True)
class Base:
    """A base model on disk, and as transformers loads it."""

    place: Path
    model: Any


def make_base(family: str, tied: bool, place: Path) -> Base:
    """A base model, written and loaded again."""
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        model = BUILD[family](tied).double()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # a fresh model's are 0
                parameter.normal_(0, 0.1)
    model.save_pretrained(place)
    return Base(place, type(model).from_pretrained(place, dtype=torch.float64).eval())


def logits(model: Any) -> torch.Tensor:
    ids = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {})
    with torch.no_grad():
        out: torch.Tensor = model(**ids).logits
    return out


@dataclass(frozen=True)
class Case:
    """An adapter, the codes that the audit gives it (informational ones apart), and what the merges make of it.

    `peft` and `ours` are the words for the input embedding, the head, the tie and the reloaded logits.
    """

    family: str
    options: dict[str, Any]
    peft: str
    ours: str
    codes: str = ""
    tied: bool = True

    def __str__(self) -> str:
        words = [str(value) for value in self.options.values()]
        return f"{self.family}{'' if self.tied else '-untied'}-{'-'.join(words)}"


E_, H_ = "embed_tokens", "lm_head"
Q = {"target_modules": ["q_proj"]}
LORA_BOTH = {"target_modules": [E_, H_]}
TIE = {"ensure_weight_tying": True}
PARTED, ONE, SAME = "own own parted exact", "own own stays exact", "base base stays exact"
CASES = [
    # Llama: every kind of adapter
    Case("llama", Q, SAME, SAME),
    Case("llama", Q | {"bias": "all"}, SAME, SAME),
    Case("llama", {"target_modules": [H_]}, "others own stays wrong", "base own parted exact", "BW501"),
    Case("llama", {"target_modules": [E_]}, "own others stays wrong", "own base parted exact", "BW501"),
    Case("llama", LORA_BOTH, "sum sum stays wrong", PARTED, "BW502"),
    Case("llama", {"target_modules": [H_]} | TIE, "repeated repeated stays wrong", ONE, "BW503"),
    Case("llama", {"target_modules": [E_]} | TIE, "repeated repeated stays wrong", ONE, "BW503"),
    Case("llama", LORA_BOTH | TIE, "repeated repeated stays wrong", ONE, "BW503"),
    Case(
        "llama",
        {"target_modules": [H_], "use_rslora": True},
        "others own stays wrong",
        "base own parted exact",
        "BW501",
    ),
    Case(
        "llama", {"target_modules": [H_], "use_dora": True}, "others own stays wrong", "base own parted exact", "BW501"
    ),
    Case(
        "llama", {"target_modules": [E_], "use_dora": True}, "own others stays wrong", "own base parted exact", "BW501"
    ),
    Case("llama", LORA_BOTH | {"use_dora": True}, "sum sum stays wrong", PARTED, "BW502"),
    Case("llama", LORA_BOTH | {"use_dora": True} | TIE, "sum sum stays wrong", PARTED, "BW502"),
    Case(
        "llama",
        {"target_modules": ["q_proj", H_], "rank_pattern": {H_: 2}, "alpha_pattern": {H_: 16}},
        "others own stays wrong",
        "base own parted exact",
        "BW501",
    ),
    Case("llama", Q | {"modules_to_save": [H_]}, "base own parted exact", "base own parted exact", "BW504"),
    Case("llama", Q | {"modules_to_save": [E_]}, "own base parted exact", "own base parted exact", "BW504"),
    Case("llama", Q | {"modules_to_save": [E_, H_]}, PARTED, PARTED, "BW504"),
    Case("llama", Q | {"modules_to_save": [H_]} | TIE, ONE, ONE),
    Case("llama", Q | {"modules_to_save": [E_]} | TIE, ONE, ONE),
    Case("llama", Q | {"trainable_token_indices": [1, 2, 3]}, ONE, ONE),
    Case("llama", Q | {"trainable_token_indices": {E_: [1, 2]}}, ONE, ONE),
    Case(
        "llama",
        Q | {"trainable_token_indices": {H_: [1, 2]}},
        "others own stays wrong",
        "base own parted exact",
        "BW505",
    ),
    Case("llama", Q | {"trainable_token_indices": {E_: [1, 2], H_: [1, 2]}}, ONE, ONE),
    Case(
        "llama",
        Q | {"trainable_token_indices": {E_: [1, 2], H_: [2, 3]}},
        "rows_of_several rows_of_several stays wrong",
        PARTED,
        "BW502",
    ),
    Case("llama", {"token_indices": [1, 2, 3]}, ONE, ONE),
    Case("llama", {"target_modules": ["q_proj", H_], "modules_to_save": [E_]}, PARTED, PARTED, "BW504"),
    Case("llama", {"target_modules": ["q_proj", E_], "modules_to_save": [H_]}, PARTED, PARTED, "BW504"),
    # an untied base: every end gets its own
    Case("llama", LORA_BOTH, "own own none exact", "own own none exact", tied=False),
    Case("llama", Q | {"modules_to_save": [H_]}, "base own none exact", "base own none exact", tied=False),
    Case("llama", Q | {"trainable_token_indices": [1, 2]}, "own base none exact", "own base none exact", tied=False),
    # a scaled embedding
    Case("gemma", {"target_modules": [E_]}, "own others stays wrong", "own base parted exact", "BW501"),
    Case("gemma", LORA_BOTH | TIE, "repeated repeated stays wrong", ONE, "BW503"),
    # GPT-2: PEFT does not know the name of its embedding, so `ensure_weight_tying` loses the head at the next load
    Case(
        "gpt2",
        {"target_modules": ["c_attn", H_], "fan_in_fan_out": True},
        "others own stays wrong",
        "base own parted exact",
        "BW501",
    ),
    Case("gpt2", {"target_modules": [H_]} | TIE, "own others stays wrong", "own base parted exact", "BW501 BW524"),
    Case("gpt2", {"target_modules": ["wte"]} | TIE, "own others stays wrong", "own base parted exact", "BW501"),
    Case("gpt2", {"target_modules": ["c_attn"], "trainable_token_indices": [1, 2]}, ONE, ONE),
    # BERT: a head with a bias, and a second tie that the flag governs
    Case(
        "bert",
        {"target_modules": ["word_embeddings"]} | TIE,
        "own others stays wrong",
        "own base parted exact",
        "BW501",
    ),
    Case(
        "bert",
        {"target_modules": ["query"], "modules_to_save": ["word_embeddings"]},
        "own base parted wrong",
        "own base parted exact",
        "BW504",
    ),
    Case(
        "bert",
        {"target_modules": ["query"], "modules_to_save": ["decoder"]},
        "base own parted exact",
        "base own parted exact",
        "BW504",
    ),
    Case(
        "bert",
        {"target_modules": ["query"], "trainable_token_indices": [1, 2]},
        "own own stays wrong",
        "own own stays wrong",
        "BW506",
    ),
    Case(
        "bert",
        {"target_modules": ["query"], "trainable_token_indices": {"decoder": [1, 2]}},
        "base own none wrong",
        "base own none wrong",
        "BW506",
        tied=False,
    ),
    Case(
        "bert",
        {"target_modules": ["query", "decoder"], "modules_to_save": ["word_embeddings"]},
        "own own parted wrong",
        PARTED,
        "BW504",
    ),
    # T5: four modules of one matrix, of which `shared` is not called
    Case("t5", {"target_modules": [H_]}, "others own stays wrong", "base own parted exact", "BW501"),
    Case("t5", {"target_modules": ["shared"]}, "own others stays wrong", "own base parted exact", "BW501 BW507"),
    Case("t5", {"target_modules": [H_]} | TIE, "own others stays wrong", "own base parted exact", "BW501 BW507 BW524"),
    Case("t5", {"target_modules": [E_]}, "sum sum stays wrong", "base base parted exact", "BW502"),
    Case(
        "t5",
        {"target_modules": ["q"], "modules_to_save": ["shared"]},
        "own base parted wrong",
        "own base parted exact",
        "BW504 BW507",
    ),
    Case("t5", {"target_modules": ["q"], "trainable_token_indices": [1, 2]}, ONE, ONE),
    Case(
        "t5",
        {"target_modules": ["q", "shared"], "modules_to_save": [H_]},
        "own own parted wrong",
        PARTED,
        "BW504 BW507",
    ),
]


def saved_adapter(case: Case, base: Base, place: Path) -> None:
    """Train, in effect: every matrix of the adapter is drawn, and PEFT saves it."""
    options = copy.deepcopy(case.options)  # PEFT writes into the lists
    rows = "token_indices" in options
    config: Any = TrainableTokensConfig(**options) if rows else LoraConfig(r=4, lora_alpha=8, **options)
    model: Any = get_peft_model(copy.deepcopy(base.model), config)
    generator = torch.Generator().manual_seed(1)
    drawn = set()
    for name, parameter in model.named_parameters():
        ours = any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens_delta"))
        if ours and "base_layer" not in name and parameter.data_ptr() not in drawn:
            drawn.add(parameter.data_ptr())  # what the ends share is drawn once
            parameter.data.normal_(0, 0.3, generator=generator)
    model.peft_config["default"].base_model_name_or_path = str(base.place)
    model.save_pretrained(place)


def loaded(base: Base, place: Path) -> Any:
    return PeftModel.from_pretrained(copy.deepcopy(base.model), place).eval()
