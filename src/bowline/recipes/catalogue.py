"""Published recipes with the numbers of their sources. `docs/recipes.md` is generated from this."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from bowline.errors import UsageError
from bowline.recipes.distribution import Scale, normal, truncated, uniform
from bowline.recipes.recipe import Recipe, Role

__all__ = ["RECIPES", "usual"]

ROOT_D, OVER_ROOT_D = Scale(1.0, {"hidden_size": 0.5}), Scale(1.0, {"hidden_size": -0.5})
BY_WIDTH = normal(hidden_size=-0.5)
GLOROT = uniform(3**0.5, fan_avg=-0.5)
"""Glorot and Bengio, 2010: U(±(3 / fan_avg)^1/2), of variance 1 / fan_avg."""

PLAIN = {Role.INPUT_EMBEDDING: normal(0.02), Role.LINEAR: normal(0.02)}
RESIDUAL = {Role.ATTENTION_OUT: normal(0.02, two_layers=-0.5), Role.FEED_FORWARD_OUT: normal(0.02, two_layers=-0.5)}

T5_ATTENTION = {
    Role.QUERY: normal(hidden_size=-0.5, head_size=-0.5),  # replaces the division of scores, which T5 omits
    Role.KEY: BY_WIDTH,
    Role.VALUE: BY_WIDTH,
    Role.ATTENTION_OUT: normal(attention_size=-0.5),
}
T5_MESH = {**T5_ATTENTION, Role.LINEAR: truncated(fan_in=-0.5), Role.RELATIVE_BIAS: GLOROT}
T5_PORT = {
    **T5_ATTENTION,
    Role.INPUT_EMBEDDING: normal(),
    Role.LINEAR: BY_WIDTH,
    Role.FEED_FORWARD_OUT: normal(intermediate_size=-0.5),
    Role.RELATIVE_BIAS: BY_WIDTH,
    Role.HEAD: normal(),
}
T5_TENSORFLOW = {  # the port divides by the total width of the heads, the others by d
    **T5_PORT,
    Role.QUERY: normal(attention_size=-0.5, head_size=-0.5),
    Role.KEY: normal(attention_size=-0.5),
    Role.VALUE: normal(attention_size=-0.5),
    Role.RELATIVE_BIAS: normal(attention_size=-0.5),
}

ALL = (
    Recipe(
        name="google-bert",
        title="BERT as Google released it",
        source="google-research/bert, modeling.py: create_initializer(0.02)",
        roles={Role.INPUT_EMBEDDING: truncated(0.02), Role.LINEAR: truncated(0.02)},
        families=("bert",),
    ),
    Recipe(
        name="transformers-bert",
        title="BERT in transformers",
        source="huggingface/transformers, modeling_bert.py and modeling_utils.py: _init_weights",
        roles=PLAIN,
        families=("bert",),
        zero_padding=True,
    ),
    Recipe(
        name="openai-gpt2",
        title="GPT-2 as OpenAI released it",
        source="openai/gpt-2, src/model.py; the paper scales residual layers, the code does not",
        roles={**PLAIN, Role.POSITIONS: normal(0.01)},
        families=("gpt2",),
    ),
    Recipe(
        name="transformers-gpt2",
        title="GPT-2 in transformers, and nanoGPT",
        source="huggingface/transformers, modeling_gpt2.py: _init_weights; karpathy/nanoGPT, model.py",
        roles={**PLAIN, **RESIDUAL},
        families=("gpt2",),
    ),
    Recipe(
        name="t5-mesh",
        title="T5 in Mesh TensorFlow",
        source="tensorflow/mesh, transformer/transformer.py: VocabEmbedding; attention.py; layers.py",
        roles={**T5_MESH, Role.INPUT_EMBEDDING: normal()},
        families=("t5",),
        logit_scale=OVER_ROOT_D,
    ),
    Recipe(
        name="t5-mesh-scaled-embedding",
        title="T5 in Mesh TensorFlow, its other coupling",
        source="tensorflow/mesh, VocabEmbedding: scale_variable_like_classifier_weights, which no published file sets",
        roles={**T5_MESH, Role.INPUT_EMBEDDING: BY_WIDTH},
        families=("t5",),
        embed_scale=ROOT_D,
    ),
    Recipe(
        name="t5x",
        title="T5 in T5X and flaxformer",
        source="google-research/t5x, examples/t5/network.py and layers.py",
        roles={
            **T5_ATTENTION,
            Role.INPUT_EMBEDDING: normal(),
            Role.LINEAR: truncated(fan_in=-0.5, corrected=True),
            Role.RELATIVE_BIAS: GLOROT,
        },
        families=("t5",),
        logit_scale=OVER_ROOT_D,
    ),
    Recipe(
        name="transformers-t5",
        title="T5 in transformers, since 4.20",
        source="huggingface/transformers, modeling_t5.py: _init_weights (#17294)",
        roles=T5_PORT,
        families=("t5",),
        logit_scale=OVER_ROOT_D,
    ),
    Recipe(
        name="transformers-t5-forced-tie",
        title="T5 in transformers 5, asked for an untied head",
        source="huggingface/transformers 5, configuration_t5.py: the flag removes the scale, and the head is tied",
        roles=T5_PORT,
        families=("t5",),
        ties=(True,),
    ),
    Recipe(
        name="transformers-t5-4.19",
        title="T5 in transformers, up to 4.19",
        source="huggingface/transformers 4.19, modeling_t5.py: nobody draws lm_head, so it is an nn.Linear's",
        roles={**T5_PORT, Role.HEAD: uniform(fan_in=-0.5)},
        families=("t5",),
        logit_scale=OVER_ROOT_D,
    ),
    Recipe(
        name="transformers-tf-t5-4.19",
        title="T5 in transformers' TensorFlow port, 4.13 to 4.19",
        source="huggingface/transformers 4.19, modeling_tf_t5.py (#14241); get_initializer is truncated",
        roles={**T5_TENSORFLOW, Role.INPUT_EMBEDDING: truncated(hidden_size=-0.5)},
        families=("t5",),
        logit_scale=OVER_ROOT_D,
    ),
    Recipe(
        name="transformers-tf-t5",
        title="T5 in transformers' TensorFlow port, from 4.20",
        source="huggingface/transformers 4.57, modeling_tf_t5.py (#17294); get_initializer is truncated",
        roles={**T5_TENSORFLOW, Role.INPUT_EMBEDDING: truncated()},
        families=("t5",),
        logit_scale=OVER_ROOT_D,
    ),
    Recipe(
        name="vaswani",
        title="The Transformer, with its scaled embedding",
        source="Vaswani et al. 2017, 3.4; tensorflow/tensor2tensor, layers/modalities.py, models/transformer.py",
        roles={Role.INPUT_EMBEDDING: BY_WIDTH, Role.HEAD: BY_WIDTH, Role.LINEAR: GLOROT},
        families=("gpt2",),
        embed_scale=ROOT_D,
    ),
    Recipe(
        name="gemma",
        title="Gemma as Google released it",
        source="google-deepmind/gemma, gm/nn/_modules.py and _layers.py: jax's normal(), whose std is 0.01",
        roles={Role.INPUT_EMBEDDING: normal(0.01), Role.LINEAR: normal(0.01)},
        families=("gemma",),
        embed_scale=ROOT_D,
        ties=(True,),
    ),
    Recipe(
        name="transformers-gemma",
        title="Gemma in transformers",
        source="huggingface/transformers, modeling_gemma.py and modeling_utils.py: _init_weights",
        roles=PLAIN,
        families=("gemma",),
        embed_scale=ROOT_D,
        zero_padding=True,
    ),
    Recipe(
        name="transformers-llama",
        title="Llama in transformers",
        source="huggingface/transformers, modeling_utils.py: _init_weights; meta-llama/llama draws nothing",
        roles=PLAIN,
        families=("llama",),
        zero_padding=True,
    ),
    Recipe(
        name="megatron",
        title="Megatron-LM",
        source="NVIDIA/Megatron-LM, megatron/core/utils.py: init_method_normal, scaled_init_method_normal",
        roles={**PLAIN, **RESIDUAL},
        families=("gpt2", "bert", "t5", "llama"),
    ),
    Recipe(
        name="torch",
        title="What torch draws where nobody says otherwise",
        source="pytorch/pytorch, torch/nn/modules: sparse.py, linear.py, rnn.py",
        roles={
            Role.INPUT_EMBEDDING: normal(),
            Role.LINEAR: uniform(fan_in=-0.5),
            Role.BIAS: uniform(fan_in=-0.5),
            Role.RECURRENT: uniform(hidden_size=-0.5),
            Role.RECURRENT_BIAS: uniform(hidden_size=-0.5),
        },
        families=("bert", "gpt2", "t5", "lstm"),
        zero_padding=True,
    ),
    Recipe(
        name="press-wolf",
        title="The tied LSTM in which tying was introduced",
        source="ofirpress/UsingTheOutputEmbedding, ptb_word_lm_WT.py, small: U(±0.1), the head's bias too",
        roles={
            Role.INPUT_EMBEDDING: uniform(0.1),
            Role.LINEAR: uniform(0.1),
            Role.HEAD_BIAS: uniform(0.1),
        },
        families=("lstm",),
    ),
    Recipe(
        name="awd-lstm",
        title="AWD-LSTM",
        source="salesforce/awd-lstm-lm, model.py: the table U(±0.1), the layers as torch draws them",
        roles={
            Role.INPUT_EMBEDDING: uniform(0.1),
            Role.LINEAR: uniform(0.1),
            Role.RECURRENT: uniform(hidden_size=-0.5),
            Role.RECURRENT_BIAS: uniform(hidden_size=-0.5),
        },
        families=("lstm",),
    ),
)

RECIPES = MappingProxyType({recipe.name: recipe for recipe in ALL})
"""All recipes by name."""

USUAL = {
    "bert": "transformers-bert",
    "albert": "transformers-bert",
    "gpt2": "transformers-gpt2",
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5"), "transformers-t5"),
    "lstm": "press-wolf",
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), "transformers-llama"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "transformers-gemma"),
}


IN_RANGE = frozenset({"transformers-bert", "transformers-gpt2", "transformers-llama", "transformers-gemma"})
"""Recipes whose 0.02 is the default of the config's `initializer_range`."""


def usual(family: str, initializer_range: float | None = None) -> Recipe:
    """The recipe that most models of a family use today, with transformers' `initializer_range` if it is given.

    Raises:
        UsageError: an unknown family.
    """
    if family not in USUAL:
        raise UsageError(f"family={family!r:.60}: expected one of {', '.join(USUAL)}", argument="family")
    recipe = RECIPES[USUAL[family]]
    if initializer_range is None or recipe.name not in IN_RANGE:
        return recipe
    by = initializer_range / 0.02
    roles = {
        role: replace(how, scale=Scale(how.scale.factor * by, how.scale.powers)) for role, how in recipe.roles.items()
    }
    return replace(recipe, roles=roles)
