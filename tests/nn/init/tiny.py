"""Models of each family that are built in milliseconds, and what their matrices are there for, written by hand."""

from __future__ import annotations

from typing import Any

import transformers as hf
from torch import nn

from bowline import models

__all__ = ["BODIES", "bowlines", "transformers_model"]

V, D = 40, 16
PLAIN: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 12,
}
GROUPED: dict[str, Any] = {**PLAIN, "num_key_value_heads": 2, "pad_token_id": 0}
T5: dict[str, Any] = {"vocab_size": V, "d_model": D, "d_kv": 6, "d_ff": 24, "num_layers": 1, "num_heads": 4}
GPT2: dict[str, Any] = {"vocab_size": V, "n_embd": D, "n_layer": 1, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
FALCON: dict[str, Any] = {**PLAIN, "ffn_hidden_size": 24, "bias": True}
BART: dict[str, Any] = {
    "vocab_size": V,
    "d_model": D,
    **{f"{stack}_{key}": n for stack in ("encoder", "decoder") for key, n in [("layers", 1), ("attention_heads", 4)]},
    "max_position_embeddings": 12,
}
DISTIL: dict[str, Any] = {"vocab_size": V, "dim": D, "n_layers": 1, "n_heads": 4, "hidden_dim": 24}
OPT: dict[str, Any] = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 1, "num_attention_heads": 4}
NEO: dict[str, Any] = {"vocab_size": V, "hidden_size": D, "num_layers": 1, "num_heads": 4}

ATTENTION = "query key value"
BERT_LAYER = {
    "{}attention.self.query": "query",
    "{}attention.self.key": "key",
    "{}attention.self.value": "value",
    "{}attention.output.dense": "attention out",
    "{}intermediate.dense": "feed-forward in",
    "{}output.dense": "feed-forward out",
}
LLAMA_ATTENTION = {"{}.q_proj": "query", "{}.k_proj": "key", "{}.v_proj": "value", "{}.o_proj": "attention out"}
BART_ATTENTION = {"{}.q_proj": "query", "{}.k_proj": "key", "{}.v_proj": "value", "{}.out_proj": "attention out"}
T5_ATTENTION = {"{}.q": "query", "{}.k": "key", "{}.v": "value", "{}.o": "attention out"}
BLOOM_LAYER = {
    "{}self_attention.query_key_value": "query, key, value, 4 times",
    "{}self_attention.dense": "attention out",
    "{}mlp.dense_h_to_4h": "feed-forward in",
    "{}mlp.dense_4h_to_h": "feed-forward out",
}


def at(prefix: str, layer: dict[str, str]) -> dict[str, str]:
    return {name.format(prefix): role for name, role in layer.items()}


def bert(name: str) -> dict[str, str]:
    return {
        f"{name}.embeddings.word_embeddings": "input embedding",
        f"{name}.embeddings.position_embeddings": "positions",
        f"{name}.embeddings.token_type_embeddings": "token types",
        **at(f"{name}.encoder.layer.0.", BERT_LAYER),
    }


BERT_HEADS = {
    "bert.pooler.dense": "pooler, classifier",
    "cls.predictions.transform.dense": "head's transform",
    "cls.predictions.bias": "head's bias",
    "cls.seq_relationship": "pooler, classifier",
}


def albert() -> dict[str, str]:
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0."
    return {
        **{name: role for name, role in bert("albert").items() if "encoder" not in name},
        "albert.encoder.embedding_hidden_mapping_in": "projection",
        **{f"{layer}attention.{name}": name for name in ATTENTION.split()},
        f"{layer}attention.dense": "attention out",
        f"{layer}ffn": "feed-forward in",
        f"{layer}ffn_output": "feed-forward out",
        "predictions.dense": "head's transform",
        "predictions.bias": "head's bias",
    }


def gpt2(attention: dict[str, str]) -> dict[str, str]:
    return {
        "transformer.wte": "input embedding",
        "transformer.wpe": "positions",
        **at("transformer.h.0.attn.", attention),
        "transformer.h.0.mlp.c_fc": "feed-forward in",
        "transformer.h.0.mlp.c_proj": "feed-forward out",
    }


FUSED_GPT2 = {"{}c_attn": "query, key, value", "{}c_proj": "attention out"}
CROSS_GPT2 = {
    "transformer.h.0.crossattention.c_attn": "key, value",
    "transformer.h.0.crossattention.q_attn": "query",
    "transformer.h.0.crossattention.c_proj": "attention out",
}


def t5(feed_forward: str, *, untied: bool = False) -> dict[str, str]:
    found = {"shared": "input embedding", **({"lm_head": "head, untied"} if untied else {})}
    for stack, last in (("encoder", 1), ("decoder", 2)):
        layer = f"{stack}.block.0.layer."
        found |= at(f"{layer}0.SelfAttention", T5_ATTENTION)
        found[f"{layer}0.SelfAttention.relative_attention_bias"] = "relative bias"
        found |= {f"{layer}{last}.DenseReluDense.{name}": "feed-forward in" for name in feed_forward.split()}
        found[f"{layer}{last}.DenseReluDense.wo"] = "feed-forward out"
    return found | at("decoder.block.0.layer.1.EncDecAttention", T5_ATTENTION)


def llama(*, tied: bool = False, attention: dict[str, str] | None = None, inner: str = "gate up") -> dict[str, str]:
    layer = "model.layers.0."
    gates = {f"{layer}mlp.{name}_proj": "feed-forward in" for name in inner.split()}
    if inner == "gate_up":
        gates = dict.fromkeys(gates, "feed-forward in, feed-forward in")
    return {
        "model.embed_tokens": "input embedding",
        **at(f"{layer}self_attn", attention or LLAMA_ATTENTION),
        **gates,
        f"{layer}mlp.down_proj": "feed-forward out",
        **({} if tied else {"lm_head": "head, untied"}),
    }


def bart() -> dict[str, str]:
    found = {"model.shared": "input embedding"}
    for stack, parts in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "encoder_attn"])):
        layer = f"model.{stack}.layers.0."
        found |= {f"model.{stack}.embed_positions": "positions"}
        found |= {name: role for part in parts for name, role in at(f"{layer}{part}", BART_ATTENTION).items()}
        found |= {f"{layer}fc1": "feed-forward in", f"{layer}fc2": "feed-forward out"}
    return found


def falcon(fused: str) -> dict[str, str]:
    layer = {**BLOOM_LAYER, "{}self_attention.query_key_value": fused}
    return {"transformer.word_embeddings": "input embedding", **at("transformer.h.0.", layer)}


NEOX = {
    "gpt_neox.embed_in": "input embedding",
    **{name.replace("self_", ""): role for name, role in at("gpt_neox.layers.0.", BLOOM_LAYER).items()},
    "lm_head": "head, untied",
}
OPT_ROLES = {
    "model.decoder.embed_tokens": "input embedding",
    "model.decoder.embed_positions": "positions",
    "model.decoder.project_in": "projection",
    "model.decoder.project_out": "projection",
    **at("model.decoder.layers.0.self_attn", BART_ATTENTION),
    "model.decoder.layers.0.fc1": "feed-forward in",
    "model.decoder.layers.0.fc2": "feed-forward out",
}
DISTIL_LAYER = "distilbert.transformer.layer.0."
DISTIL_ROLES = {
    "distilbert.embeddings.word_embeddings": "input embedding",
    "distilbert.embeddings.position_embeddings": "positions",
    f"{DISTIL_LAYER}attention.q_lin": "query",
    f"{DISTIL_LAYER}attention.k_lin": "key",
    f"{DISTIL_LAYER}attention.v_lin": "value",
    f"{DISTIL_LAYER}attention.out_lin": "attention out",
    f"{DISTIL_LAYER}ffn.lin1": "feed-forward in",
    f"{DISTIL_LAYER}ffn.lin2": "feed-forward out",
    "vocab_transform": "head's transform",
    "vocab_projector.bias": "head's bias",
}
ROBERTA_HEAD = {"lm_head.dense": "head's transform", "lm_head.bias": "head's bias"}
PHI = {
    name.replace("o_proj", "dense").replace("gate_proj", "fc1").replace("down_proj", "fc2"): role
    for name, role in llama(inner="gate").items()
} | {"lm_head.bias": "head's bias"}
FUSED_LLAMA = {"{}.qkv_proj": "query, key, value", "{}.o_proj": "attention out"}

# name: (class, its config's class and content, the role of each matrix and of each bias that is the head's)
BODIES: dict[str, tuple[str, str, dict[str, Any], dict[str, str]]] = {
    "bert": ("BertForPreTraining", "BertConfig", PLAIN, {**bert("bert"), **BERT_HEADS}),
    "bert-classifier": (
        "BertForSequenceClassification",
        "BertConfig",
        PLAIN,
        {**bert("bert"), "bert.pooler.dense": "pooler, classifier", "classifier": "pooler, classifier"},
    ),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", PLAIN, {**bert("roberta"), **ROBERTA_HEAD}),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**PLAIN, "embedding_size": 8}, albert()),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", DISTIL, DISTIL_ROLES),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, gpt2(FUSED_GPT2)),
    "gpt2-cross": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {**GPT2, "add_cross_attention": True},
        {**gpt2(FUSED_GPT2), **CROSS_GPT2},
    ),
    "gpt2-untied": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {**GPT2, "tie_word_embeddings": False},
        {**gpt2(FUSED_GPT2), "lm_head": "head, untied"},
    ),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {**NEO, "attention_types": [[["global"], 1]]},
        gpt2(
            {name.replace("{}", "{}attention").replace("o_proj", "out_proj"): r for name, r in LLAMA_ATTENTION.items()}
        ),
    ),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT2, gpt2(FUSED_GPT2)),
    "gpt-bigcode-heads": (
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        {**GPT2, "multi_query": False},
        gpt2({**FUSED_GPT2, "{}c_attn": "query, key, value, 4 times"}),
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", PLAIN, NEOX),
    "opt": ("OPTForCausalLM", "OPTConfig", {**OPT, "ffn_dim": 24, "word_embed_proj_dim": 8}, OPT_ROLES),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": V, "hidden_size": D, "n_layer": 1, "n_head": 4},
        falcon("query, key, value, 4 times"),
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, t5("wi")),
    "t5-gated": (
        "T5ForConditionalGeneration",
        "T5Config",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},  # it is tied, for all that
        t5("wi_0 wi_1"),
    ),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", T5, t5("wi_0 wi_1")),
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config", T5, t5("wi_0 wi_1")),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART, bart()),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "attention_bias": True}, llama()),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "tie_word_embeddings": True}, llama(tied=True)),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED, llama()),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED, llama()),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 6}, llama()),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**GROUPED, "head_dim": 6}, llama(tied=True)),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 6}, llama(tied=True)),
    "phi": ("PhiForCausalLM", "PhiConfig", PLAIN, PHI),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", GROUPED, llama(attention=FUSED_LLAMA, inner="gate_up")),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {**FALCON, "multi_query": False},
        falcon("query, key, value, 4 times"),
    ),
    "falcon-multi-query": ("FalconForCausalLM", "FalconConfig", FALCON, falcon("query, key, value")),
    "falcon-grouped": (
        "FalconForCausalLM",
        "FalconConfig",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
        falcon("query, key, value, 2 times"),
    ),
}


def transformers_model(name: str, **changes: Any) -> nn.Module:
    cls, config, content, _ = BODIES[name]
    model: nn.Module = getattr(hf, cls)(getattr(hf, config)(**{**content, **changes}))
    return model


LSTM_ROLES = {
    "lstm.wte": "input embedding",
    **{f"lstm.layers.{at}.weight_{end}_l0": "recurrent" for at in range(2) for end in ("ih", "hh")},
    **{f"lstm.layers.{at}.bias_{end}_l0": "recurrent bias" for at in range(2) for end in ("ih", "hh")},
    "lstm.projection": "projection",
    "lm_head.bias": "head's bias",
}


def bowlines(*, tied: bool = True) -> dict[str, tuple[Any, dict[str, str]]]:
    """Bowline's own families, and the roles of their matrices."""
    flag: Any = {"tie_word_embeddings": tied}
    bert_heads = BERT_HEADS
    if not tied:
        bert_heads = {
            **BERT_HEADS,
            "cls.predictions.decoder": "head, untied",
            "cls.predictions.decoder.bias": "head's bias",
        }
    own = {} if tied else {"lm_head": "head, untied"}
    lstm = models.LSTMConfig(vocab_size=V, hidden_size=8, embedding_size=6, **flag)
    return {
        "bert": (
            models.BertForPreTraining(models.BertConfig(**PLAIN, **flag)),
            {**bert("bert"), **bert_heads},
        ),
        "gpt2": (models.GPT2LMHeadModel(models.GPT2Config(**GPT2, **flag)), {**gpt2(FUSED_GPT2), **own}),
        "t5": (
            models.T5ForConditionalGeneration(models.T5Config(**T5, **flag)),
            t5("wi", untied=not tied),
        ),
        "lstm": (models.LSTMLMHeadModel(lstm), {**LSTM_ROLES, **own}),
    }
