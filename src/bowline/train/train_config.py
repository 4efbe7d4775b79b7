"""The configuration of `bowline train`: one frozen record, which can be written as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self

from bowline.checkpoint.formats.strict_json import loads
from bowline.errors import UsageError
from bowline.recipes import RECIPES
from bowline.train.loop.trainer_settings import MAY_DIFFER, TrainerSettings
from bowline.train.parallel.mesh_sizes import PARALLEL
from bowline.train.presets import FAMILIES, HEAD_BIASES, SIZES, Preset, preset

__all__ = ["TrainConfig"]

PAD_LOGITS = ("keep", "mask")
RANDOM_TOKENS = ("all", "ordinary")
MOST_HIDDEN = 0.9
"""The largest share of a T5's tokens to mask: with more, the encoder has almost nothing to read."""
OF_PRESET = ("steps", "length", "batch_size", "accumulation", "learning_rate", "mask_share")
"""Fields that the size sets if they are not given."""
OF_DRAW = {"head_bias": None, "embedding_rate": 1.0}
"""Fields that the size sets only for its own initial weights, with their values for a recipe or a checkpoint."""
MAY_CHANGE = MAY_DIFFER | {"device"}
"""Fields that a resumed run may change: they affect the weights at most by rounding."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run from plain text. `None` leaves a field to the size or to the checkpoint that is fine-tuned.

    A field with a `help` in its metadata is an option of `bowline train`.

    Args:
        family: gpt2, bert, t5 or lstm.
        data: "stdlib", files and directories.
        size: nano, small or base.
        model: keys of the family's config, which replace those of the size.
        vocab_size: exact number of tokens of a new tokenizer; by default that of the size, or fewer if the text gives
            fewer.
        tokenizer: the directory of a tokenizer to use instead of a new one.
        init_from: a checkpoint to fine-tune, with its tokenizer.
        tie: whether the head is the embedding; by default it is, or is as in the checkpoint.
        untie_at_step: the number of steps after which the head gets its own matrix.
        recipe: how the model is initialised (`bowline.recipes`); by default in the family's own way.
        pad_logit: "keep" or "mask"; with "mask" the padding token's logit is -inf, so that its row stays as it is.
        head_bias: "zero" or "unigram"; with "unigram" it starts at the log of each token's frequency in the text.
        mask_share: the share of a BERT's or a T5's tokens that are to be predicted.
        random_tokens: "all" or "ordinary": see `bowline.train.text.objectives.MaskedBatches`.
        strict: refuse bytes and files that are not text instead of skipping them.
        held_out_share: the share of the text that is held out, in whole documents.
        held_out_tokens: the most tokens that an evaluation reads.
        length: tokens per input.
        batch_size: inputs per batch.
        device: cpu, cuda.
        steps, learning_rate, embedding_rate, min_learning_rate, warmup_steps, weight_decay, clip, accumulation, bf16,
            activation_checkpointing, compile, parallel, mesh, seed, log_every, evaluate_every, save_every, keep: see
            `TrainerSettings`. `seed` also determines the initial weights and the order of the text.

    Raises:
        UsageError: an invalid value, or two that contradict each other.

    Example:
        >>> config = TrainConfig(family="gpt2", steps=300)
        >>> config.settings().learning_rate == config.preset.learning_rate, config.settings().steps
        (True, 300)
        >>> TrainConfig.from_dict(config.to_dict()) == config
        True
    """

    family: str = field(metadata={"help": "The model family; by default that of --init-from.", "choices": FAMILIES})
    data: tuple[str, ...] = field(
        default=("stdlib",),
        metadata={"help": "A text file, a directory, or stdlib (the default). Repeatable.", "metavar": "PATH"},
    )
    size: str = field(
        default="nano",
        metadata={"help": "Size of the model and its usual settings; by default nano.", "choices": SIZES},
    )
    model: Mapping[str, Any] = field(default_factory=dict)
    vocab_size: int | None = field(default=None, metadata={"help": "Exact number of tokens of the new tokenizer."})
    tokenizer: str | None = field(
        default=None, metadata={"help": "Use the tokenizer in DIR instead of training one.", "metavar": "DIR"}
    )
    init_from: str | None = field(default=None, metadata={"help": "Fine-tune the checkpoint in DIR.", "metavar": "DIR"})
    tie: bool | None = field(
        default=None,
        metadata={"help": "Tie the head to the embedding, or give it its own matrix.", "flag": "--tie/--untie"},
    )
    untie_at_step: int | None = field(default=None, metadata={"help": "Untie the head after this many steps."})
    recipe: str | None = field(default=None, metadata={"help": "Recipe to initialise the model; see docs/recipes.md."})
    pad_logit: str | None = field(
        default=None,
        metadata={"help": "mask: never predict padding, so that its row stays unchanged.", "choices": PAD_LOGITS},
    )
    head_bias: str | None = field(
        default=None,
        metadata={"help": "Initial value of the head's bias; by default as the size sets it.", "choices": HEAD_BIASES},
    )
    mask_share: float | None = field(
        default=None, metadata={"help": "Share of tokens to mask (bert, t5); by default as the size sets it."}
    )
    random_tokens: str = field(
        default="all",
        metadata={
            "help": "Tokens that may replace a masked one (bert): all, or ordinary for no special ones.",
            "choices": RANDOM_TOKENS,
        },
    )
    strict: bool = field(
        default=False, metadata={"help": "Refuse bytes and files that are not text instead of skipping them."}
    )
    held_out_share: float = field(default=0.05, metadata={"help": "Share of the text that is held out of training."})
    held_out_tokens: int = 2**15
    length: int | None = field(default=None, metadata={"help": "Tokens per input; by default as the size sets it."})
    batch_size: int | None = field(default=None, metadata={"help": "Inputs per batch; by default as the size sets it."})
    device: str = field(default="cpu", metadata={"help": "Device to compute on, such as cpu or cuda."})
    steps: int | None = field(default=None, metadata={"help": "Optimizer steps; by default as the size sets it."})
    learning_rate: float | None = field(
        default=None, metadata={"help": "Highest learning rate, after the warm-up; by default as the size sets it."}
    )
    embedding_rate: float | None = field(
        default=None,
        metadata={"help": "Multiple of the learning rate for the embedding; by default as the size sets it."},
    )
    min_learning_rate: float = 0.1
    warmup_steps: int | None = field(
        default=None,
        metadata={"help": "Steps in which the learning rate rises; by default a tenth of all, at most 100."},
    )
    weight_decay: float = field(default=0.1, metadata={"help": "Weight decay of matrices, including the tied one."})
    clip: float = field(default=1.0, metadata={"help": "Norm at which gradients are clipped; 0 for no clipping."})
    accumulation: int | None = field(
        default=None, metadata={"help": "Batches per step; by default as the size sets it."}
    )
    bf16: bool = field(default=False, metadata={"help": "Compute in bfloat16 by autocast."})
    activation_checkpointing: bool = field(
        default=False, metadata={"help": "Recompute activations in the backward pass: less memory, more time."}
    )
    compile: bool = field(default=False, metadata={"help": "Compile the model with torch.compile."})
    parallel: str | None = field(
        default=None,
        metadata={"help": "How the processes of torchrun share the work; by default ddp.", "choices": PARALLEL},
    )
    mesh: str | None = field(
        default=None,
        metadata={"help": "A combination, with the processes along each dimension: fsdp=2,tp=2.", "metavar": "SIZES"},
    )
    seed: int = field(default=0, metadata={"help": "Seed for the initial weights, the order of the text, and dropout."})
    log_every: int = field(default=10, metadata={"help": "Steps between log records."})
    evaluate_every: int = field(default=100, metadata={"help": "Steps between held-out evaluations."})
    save_every: int = field(default=200, metadata={"help": "Steps between checkpoints."})
    keep: int = field(default=2, metadata={"help": "Number of checkpoints to keep."})

    def __post_init__(self) -> None:
        data: Any = self.data
        data = (data,) if isinstance(data, str) else tuple(data) if isinstance(data, (list, tuple)) else data
        if not isinstance(data, tuple) or not data or not all(isinstance(one, str) and one for one in data):
            raise UsageError(f"data={self.data!r:.60}: expected stdlib, or files and directories", argument="data")
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "model", dict(self.model) if isinstance(self.model, Mapping) else self.model)
        self._among("family", FAMILIES)
        self._among("random_tokens", RANDOM_TOKENS)
        self._among("pad_logit", (None, *PAD_LOGITS))
        self._among("head_bias", (None, *HEAD_BIASES))
        self._among("recipe", (None, *RECIPES))
        if not isinstance(self.model, dict):
            raise UsageError(
                f"model={self.model!r:.60}: expected {{key of the model's config: value}}", argument="model"
            )
        for name, least in (("vocab_size", 64), ("length", 4), ("batch_size", 1), ("held_out_tokens", 1)):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31
            if not whole and not (value is None and name != "held_out_tokens"):
                raise UsageError(f"{name}={value!r:.60}: expected a whole number from {least}", argument=name)
        for name in ("held_out_share", "mask_share"):
            share = getattr(self, name)
            real = not isinstance(share, bool) and isinstance(share, (int, float)) and 0 < share < 1
            if not real and not (share is None and name == "mask_share"):
                raise UsageError(f"{name}={share!r:.60}: expected a number above 0 and below 1", argument=name)
        for name in ("tokenizer", "init_from"):
            if getattr(self, name) is not None and not (isinstance(getattr(self, name), str) and getattr(self, name)):
                raise UsageError(f"{name}={getattr(self, name)!r:.60}: expected a directory", argument=name)
        for name in ("tie", "strict"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name == "tie"):
                raise UsageError(f"{name}={value!r:.60}: expected true or false", argument=name)
        self._contradictions()
        self.settings()

    def _among(self, name: str, known: tuple[Any, ...]) -> None:
        value = getattr(self, name)
        if value not in known or isinstance(value, bool):
            close = get_close_matches(str(value), [str(one) for one in known], n=1)
            expected = ", ".join(str(one) for one in known if one is not None)
            raise UsageError(
                f"{name}={value!r:.60}: expected one of {expected}",
                help=f"perhaps {close[0]}" if close else None,
                argument=name,
            )

    def _contradictions(self) -> None:
        for one, other, why, way_out in (
            ("tokenizer", "vocab_size", "a given tokenizer has its own vocabulary size", "leave one of them out"),
            ("init_from", "tokenizer", "a checkpoint is fine-tuned with its own tokenizer", "leave --tokenizer out"),
            (
                "init_from",
                "vocab_size",
                "a checkpoint has its own vocabulary",
                "change it with bowline.nn.resize_vocab",
            ),
            (
                "init_from",
                "recipe",
                "a recipe initialises new weights, and a checkpoint has trained ones",
                "leave one of them out",
            ),
            ("init_from", "model", "a checkpoint has its own config", "leave one of them out"),
        ):
            if getattr(self, one) and getattr(self, other):
                raise UsageError(f"{one} and {other}: {why}", help=way_out, argument=(one, other))
        if self.head_bias is not None and self.init_from is not None:
            raise UsageError(
                "init_from and head_bias: the checkpoint has a trained bias already",
                help="leave --head-bias out",
                argument=("init_from", "head_bias"),
            )
        if self.untie_at_step is not None and self.tie is False:
            raise UsageError(
                "untie_at_step and tie=false: there is no tie to undo",
                help="leave --untie or --untie-at-step out",
                argument=("untie_at_step", "tie"),
            )
        if self.head_bias is not None and self.family in ("gpt2", "t5"):
            raise UsageError(
                f"head_bias={self.head_bias!r}: the head of a {self.family} has no bias",
                help="leave it out; only bert and lstm have a head with a bias",
                argument="head_bias",
            )
        if self.mask_share is not None and self.family in ("gpt2", "lstm"):
            raise UsageError(
                f"mask_share={self.mask_share!r:.60}: a {self.family} is trained without masking",
                help="leave it out; it is for bert and t5",
                argument="mask_share",
            )
        if self.mask_share is not None and self.family == "t5" and self.mask_share > MOST_HIDDEN:
            raise UsageError(
                f"mask_share={self.mask_share!r:.60}: expected at most {MOST_HIDDEN} of a t5's tokens",
                help="give a smaller share; the encoder needs tokens between the masked spans",
                argument="mask_share",
            )
        if self.pad_logit == "mask" and self.family in ("gpt2", "lstm"):
            raise UsageError(
                f"pad_logit='mask': a {self.family} is trained without padding, so it has no padding row",
                help="leave it out; it is for bert and t5",
                argument="pad_logit",
            )

    @property
    def preset(self) -> Preset:
        """The settings of the size."""
        return preset(self.family, self.size)

    @property
    def drawn_by(self) -> str | None:
        """The recipe by which a new model is initialised; `None` for the family's own way, which is transformers'.

        A T5 with a head of its own is drawn by `t5-mesh`: transformers draws such a head with std 1, and the first loss
        is six times ln V.
        """
        if self.recipe is None and self.family == "t5" and self.tie is False:
            return "t5-mesh"
        return self.recipe

    def value(self, name: str) -> Any:
        """The value of a field, or that of the size if the field is `None`."""
        value = getattr(self, name)
        if value is not None or name not in (*OF_PRESET, *OF_DRAW):
            return value
        elsewhere = name in OF_DRAW and (self.init_from is not None or self.drawn_by is not None)
        return OF_DRAW[name] if elsewhere else getattr(self.preset, name)

    def settings(self) -> TrainerSettings:
        """The settings of the training loop."""
        names = {one.name for one in fields(TrainerSettings)} & {one.name for one in fields(self)}
        settings = TrainerSettings(**{name: self.value(name) for name in names})
        if settings.untie_at_step is not None and settings.untie_at_step >= settings.steps:
            raise UsageError(
                f"untie_at_step={settings.untie_at_step}: expected fewer than the {settings.steps} steps",
                argument="untie_at_step",
            )
        return settings

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the family, data, size and seed, and all fields that differ from their defaults."""
        content = dataclasses.asdict(self) | {"data": list(self.data)}
        always = ("family", "data", "size", "seed")
        return {
            one.name: content[one.name]
            for one in fields(self)
            if one.name in always or content[one.name] not in (one.default, {})
        }

    def effective(self) -> dict[str, Any]:
        """Every field with the value that the run uses."""
        content = dataclasses.asdict(self) | {"data": list(self.data)}
        return content | {name: self.value(name) for name in (*OF_PRESET, *OF_DRAW)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], origin: str = "the configuration") -> Self:
        """Makes a configuration from a JSON object. Without a family, it is that of the checkpoint `init_from`.

        Raises:
            UsageError: a key that is not a field, or an invalid value.
            ConfigError: the checkpoint `init_from` has no config, or that of a model that Bowline does not have.
        """
        known = [one.name for one in fields(cls)]
        for key in content:
            if key not in known:
                close = get_close_matches(str(key), known, n=1)
                raise UsageError(
                    f"{origin}: {key!r:.60} is not a setting of a training run",
                    help=f"perhaps {close[0]}" if close else f"expected one of {', '.join(known)}",
                )
        if "family" not in content and isinstance(content.get("init_from"), str) and content["init_from"]:
            from bowline.models.auto import family_at  # loads torch, which the options do not need

            content = {**content, "family": family_at(content["init_from"])}
        if "family" not in content:
            raise UsageError(
                f"no family: expected one of {', '.join(FAMILIES)}",
                help="give --family, --config FILE with a family, or --init-from a checkpoint",
            )
        return cls(**content)

    @staticmethod
    def read(path: Path) -> dict[str, Any]:
        """Reads the JSON file of a configuration.

        Raises:
            UsageError: it cannot be read, or does not hold an object.
            FormatError: it is not JSON.
        """
        try:
            content = loads(path.read_bytes(), str(path))
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror or error}", help="give another file") from None
        if not isinstance(content, dict):
            raise UsageError(
                f"{path}: expected a JSON object, got a {type(content).__name__}", help='such as {"family": "gpt2"}'
            )
        return content

    def dumps(self) -> str:
        """The JSON of `to_dict`."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """The differences from `effective` of another run, one line for each, without fields that change no weight.

        Example:
            >>> TrainConfig(family="gpt2").differences(TrainConfig(family="gpt2", steps=7, keep=9).effective())
            ['steps was 7 and is 1000']
        """
        mine = self.effective()
        return [
            f"{name} was {other.get(name)!r:.60} and is {mine[name]!r:.60}"
            for name in mine
            if name not in MAY_CHANGE and other.get(name) != mine[name]
        ]
