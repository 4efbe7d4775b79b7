"""Makes realistic variants of small trained models, and holds the audit's verdict against a load by transformers.

    HF_HUB_OFFLINE=1 python -m tools.variants [--report FILE] [NAME ...]

A variant is what a training or merging script leaves on disk: merged adapters, resized and untied models, shards, names
that a wrapper changed. Each is written by the library that writes it in practice (transformers, peft, torch), audited
by the command, and loaded by transformers. The output is a table in Markdown. The exit code is 1 if a variant that
the audit calls clean loads with missing tensors. `docs/notes/variants.md` has the table of one run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from typer.testing import CliRunner

from bowline.cli import app

__all__ = ["VARIANTS", "Made", "Row", "base_model", "run_variant", "table_of"]

VOCABULARY, WIDTH, LAYERS, STEPS = 512, 64, 3, 8
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IDS = torch.arange(24).reshape(2, 12) * 7 % VOCABULARY
LONGEST_LINE = 240

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Made:
    """A variant on disk: the place to audit, the options of the audit, and the place that transformers loads.

    `reference` has the logits that the model computed before it was written; `None`: there is nothing to compare.
    """

    place: Path
    options: tuple[str, ...] = ()
    load: Path | None = None
    reference: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one variant; `not_run` says why there is none."""

    name: str
    what: str
    exit_code: int = 0
    codes: tuple[str, ...] = ()
    line: str = ""
    missing: int = 0
    tied: bool | None = None
    refusal: str | None = None
    off: float | None = None
    not_run: str | None = None

    @property
    def verdict(self) -> str:
        """The audit's verdict in a few words."""
        word = {0: "clean", 1: "findings", 2: "could not be audited"}[self.exit_code]
        return f"{self.exit_code}, {word}" + (f": {', '.join(self.codes)}" if self.codes else "")

    @property
    def loaded(self) -> str:
        """What transformers did, in a few words."""
        if self.refusal is not None:
            return f"refused: {self.refusal}"
        off = "" if self.off is None else f", logits off by {self.off:.2g}" if self.off > 1e-5 else ", logits kept"
        return f"{self.missing} missing, {'tied' if self.tied else 'untied'}{off}"

    @property
    def silent(self) -> bool:
        """Whether the audit calls the variant clean, but transformers draws tensors of it at random."""
        return self.exit_code == 0 and self.missing > 0


@dataclass(frozen=True)
class Variant:
    """A name, one phrase, and the function that writes the variant into an empty directory."""

    name: str
    what: str
    make: Callable[[Path], Made] = field(compare=False)


VARIANTS: dict[str, Variant] = {}


def variant(name: str, what: str) -> Callable[[Callable[[Path], Made]], Callable[[Path], Made]]:
    """Register a function as the variant `name`."""

    def register(make: Callable[[Path], Made]) -> Callable[[Path], Made]:
        VARIANTS[name] = Variant(name, what, make)
        return make

    return register


# --- the models -------------------------------------------------------------------------------------------------------


def base_model(kind: str = "llama", *, tied: bool = True) -> Any:
    """A small model after a few steps of training, so that its rows differ in length; always the same one."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    if kind == "gpt2":
        sizes |= {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
        model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    else:
        sizes |= {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table.mul_(torch.rand(VOCABULARY, 1).mul(1.5).add(0.5))
    train(model)
    return model.eval()


def train(model: Any, steps: int = STEPS) -> None:
    """A few steps of AdamW on random tokens."""
    model.train()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(VOCABULARY, (4, 32), generator=generator)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """The logits for a fixed input; those of added tokens are left out."""
    found: torch.Tensor = model(input_ids=IDS).logits[..., :VOCABULARY].float()
    return found


def saved(model: Any, path: Path, **options: Any) -> Made:
    """The model as `save_pretrained` writes it."""
    model.save_pretrained(path, **options)
    return Made(place=path, reference=logits(model))


def state_of(model: Any) -> Tensors:
    """The state dict, with a tied matrix under its embedding's name only."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop(HEAD, None)
    return state


def written(model: Any, path: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Made:
    """The tensors as a script writes them, beside the model's config."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, path / "model.safetensors", {"format": "pt"}
    )
    edit_config(path, **config)
    return Made(place=path, reference=logits(model))


def edit_config(path: Path, **keys: Any) -> None:
    """Write keys into config.json."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | keys))


def renamed(path: Path, change: Callable[[str], str]) -> Made:
    """The tied Llama with every tensor under another name."""
    model = base_model()
    return written(model, path, {change(name): value for name, value in state_of(model).items()})


def in_layers(part: str) -> Callable[[str], str]:
    """Put a wrapper's segment behind the number of each layer."""
    return lambda name: re.sub(r"(layers\.\d+\.)", rf"\1{part}.", name)


def tokenizer(path: Path, size: int) -> None:
    """A word-level tokenizer of this many tokens."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({f"t{at}": at for at in range(size)}, unk_token="t0")).save(str(path / "tokenizer.json"))


# --- as saved ---------------------------------------------------------------------------------------------------------


@variant("llama", "tied Llama, `save_pretrained`")
def _llama(path: Path) -> Made:
    return saved(base_model(), path)


@variant("gpt2", "tied GPT-2, `save_pretrained`")
def _gpt2(path: Path) -> Made:
    return saved(base_model("gpt2"), path)


@variant("bfloat16", "cast to bfloat16 and saved")
def _bfloat16(path: Path) -> Made:
    return saved(base_model().to(torch.bfloat16), path)


@variant("sharded", "in shards, with an index")
def _sharded(path: Path) -> Made:
    return saved(base_model(), path, max_shard_size="150KB")


@variant("bin", "`pytorch_model.bin`, both names on one storage")
def _bin(path: Path) -> Made:
    made = saved(base_model(), path)
    (path / "model.safetensors").unlink()
    torch.save(base_model().state_dict(), path / "pytorch_model.bin")
    return made


@variant("bin-nested", "`pytorch_model.bin` with the state dict under a key")
def _bin_nested(path: Path) -> Made:
    made = saved(base_model(), path)
    (path / "model.safetensors").unlink()
    torch.save({"model": base_model().state_dict(), "step": 8}, path / "pytorch_model.bin")
    return made


# --- adapters ---------------------------------------------------------------------------------------------------------


def adapted(targets: list[str] | None, **options: Any) -> Any:
    """A trained adapter of rank 4 on the tied Llama."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(base_model(), LoraConfig(r=4, lora_alpha=8, target_modules=targets, **options))
    train(model)
    return model


def merged(path: Path, targets: list[str], *, base: bool, **options: Any) -> Made:
    """The adapter merged by peft, audited beside its base or alone; the reference is the adapter model."""
    model = adapted(targets, **options)
    reference = logits(model)
    model.merge_and_unload().save_pretrained(path / "merged")
    base_model().save_pretrained(path / "base")
    return Made(place=path / "merged", options=("--base", str(path / "base")) if base else (), reference=reference)


@variant("lora-attention", "LoRA on q_proj and v_proj, merged, with `--base`")
def _lora_attention(path: Path) -> Made:
    return merged(path, ["q_proj", "v_proj"], base=True)


@variant("lora-head-alone", "LoRA on lm_head, merged, without the base")
def _lora_head_alone(path: Path) -> Made:
    return merged(path, ["lm_head"], base=False)


@variant("lora-head", "LoRA on lm_head, merged, with `--base`")
def _lora_head(path: Path) -> Made:
    return merged(path, ["lm_head"], base=True)


@variant("lora-embedding", "LoRA on embed_tokens, merged, with `--base`")
def _lora_embedding(path: Path) -> Made:
    return merged(path, ["embed_tokens"], base=True)


@variant("lora-both", "LoRA on embed_tokens and lm_head, merged, with `--base`")
def _lora_both(path: Path) -> Made:
    return merged(path, ["embed_tokens", "lm_head"], base=True)


@variant("lora-untied", 'LoRA on lm_head, merged by `merge_lora(on_tie="untie")`, with `--base`')
def _lora_untied(path: Path) -> Made:
    from bowline.nn import merge_lora

    model = adapted(["lm_head"])
    reference = logits(model)
    untied: Any = merge_lora(model, on_tie="untie")
    untied.save_pretrained(path / "merged")
    base_model().save_pretrained(path / "base")
    return Made(place=path / "merged", options=("--base", str(path / "base")), reference=reference)


@variant("modules-to-save", 'LoRA with `modules_to_save=["lm_head"]`, merged')
def _modules_to_save(path: Path) -> Made:
    return merged(path, ["q_proj"], base=False, modules_to_save=["lm_head"])


@variant("adapter", "the adapter alone, not merged")
def _adapter(path: Path) -> Made:
    model = adapted(["q_proj"])
    base_model().save_pretrained(path / "base")
    model.peft_config["default"].base_model_name_or_path = str(path / "base")
    model.save_pretrained(path / "adapter")
    return Made(place=path / "adapter", reference=logits(model))


@variant("adapter-state", "state dict of the model with its adapter inside")
def _adapter_state(path: Path) -> Made:
    model = adapted(["q_proj"])
    state = {name: value.clone() for name, value in model.state_dict().items() if not name.endswith(HEAD)}
    return written(model.base_model.model, path, state)


# --- vocabularies -----------------------------------------------------------------------------------------------------


def resized(path: Path, tokens: int, rows: int = VOCABULARY + 8) -> Made:
    model = base_model()
    reference = logits(model)
    model.resize_token_embeddings(rows)
    model.save_pretrained(path)
    tokenizer(path, tokens)
    return Made(place=path, reference=reference)


@variant("resized", "8 tokens added, tokenizer of that size")
def _resized(path: Path) -> Made:
    return resized(path, VOCABULARY + 8)


@variant("resized-tokenizer-larger", "8 tokens added, tokenizer with 4 more")
def _resized_tokenizer_larger(path: Path) -> Made:
    return resized(path, VOCABULARY + 12)


@variant("resized-config-old", "8 tokens added, `vocab_size` as before")
def _resized_config_old(path: Path) -> Made:
    made = resized(path, VOCABULARY + 8)
    edit_config(path, vocab_size=VOCABULARY)
    return made


# --- the tie ----------------------------------------------------------------------------------------------------------


def untied_and_trained() -> Any:
    model = base_model(tied=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    train(model)
    return model


@variant("untied", "untied and trained, flag false")
def _untied(path: Path) -> Made:
    return saved(untied_and_trained(), path)


@variant("untied-flag-true", "untied and trained, flag still true")
def _untied_flag_true(path: Path) -> Made:
    made = saved(untied_and_trained(), path)
    edit_config(path, tie_word_embeddings=True)
    return made


@variant("tied-flag-false", "tied in memory, flag false: the head is not saved")
def _tied_flag_false(path: Path) -> Made:
    model = base_model(tied=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    return saved(model, path)


@variant("stored-under-head", "`safetensors.torch.save_model` of a tied model")
def _stored_under_head(path: Path) -> Made:
    from safetensors.torch import save_model

    made = saved(base_model(), path)
    save_model(base_model(), str(path / "model.safetensors"), {"format": "pt"})
    return made


# --- interrupted ------------------------------------------------------------------------------------------------------


@variant("shard-missing", "in shards, the second is missing")
def _shard_missing(path: Path) -> Made:
    made = saved(base_model(), path, max_shard_size="150KB")
    sorted(path.glob("*.safetensors"))[1].unlink()
    return made


@variant("truncated", "the file ends early")
def _truncated(path: Path) -> Made:
    made = saved(base_model(), path)
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[: len(content) // 2])
    return made


@variant("layers-missing", "the last layer is not in the file")
def _layers_missing(path: Path) -> Made:
    model = base_model()
    state = {name: value for name, value in state_of(model).items() if f"layers.{LAYERS - 1}." not in name}
    return written(model, path, state)


# --- names ------------------------------------------------------------------------------------------------------------


@variant("pruned", "`torch.nn.utils.prune` on q_proj, not made permanent")
def _pruned(path: Path) -> Made:
    from torch.nn.utils import prune

    model = base_model()
    for layer in model.model.layers:
        prune.l1_unstructured(layer.self_attn.q_proj, "weight", amount=0.2)
    return written(model, path, state_of(model))


@variant("prefix-module", "`module.` in front (DataParallel)")
def _prefix_module(path: Path) -> Made:
    return renamed(path, lambda name: f"module.{name}")


@variant("prefix-model", "`model.` in front (a LightningModule)")
def _prefix_model(path: Path) -> Made:
    return renamed(path, lambda name: f"model.{name}")


@variant("prefix-net", "`net.` in front (a module of one's own)")
def _prefix_net(path: Path) -> Made:
    return renamed(path, lambda name: f"net.{name}")


@variant("compiled-layers", "`_orig_mod.` in each layer (compiled layer by layer)")
def _compiled_layers(path: Path) -> Made:
    return renamed(path, in_layers("_orig_mod"))


@variant("fsdp-layers", "`_fsdp_wrapped_module.` in front and in each layer")
def _fsdp_layers(path: Path) -> Made:
    return renamed(path, lambda name: "_fsdp_wrapped_module." + in_layers("_fsdp_wrapped_module")(name))


@variant("checkpointed-layers", "`_checkpoint_wrapped_module.` in each layer")
def _checkpointed_layers(path: Path) -> Made:
    return renamed(path, in_layers("_checkpoint_wrapped_module"))


# --- layouts ----------------------------------------------------------------------------------------------------------


@variant("trainer", "a Trainer's output with `checkpoint-N/`, with `--recursive`")
def _trainer(path: Path) -> Made:
    model = base_model()
    data = [{"input_ids": IDS[0], "labels": IDS[0]}] * 8
    arguments = transformers.TrainingArguments(
        output_dir=str(path), max_steps=2, save_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to=[],
        disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    return Made(place=path, options=("--recursive",), load=path / "checkpoint-2", reference=logits(model.eval()))


@variant("sentence-transformers", "the layout of sentence-transformers: a BertModel and its pooling")
def _sentence_transformers(path: Path) -> Made:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    transformers.BertModel(config).save_pretrained(path)
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": WIDTH}))
    (path / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": ""}]))
    return Made(place=path)


@variant("torchao-int8", "int8 weights by torchao")
def _torchao(path: Path) -> Made:
    if not find_spec("torchao"):
        raise NotImplementedError("torchao is not installed")
    model = base_model()
    model.save_pretrained(path / "float")
    from torchao.quantization import Int8WeightOnlyConfig  # type: ignore[import-not-found]

    quantised = transformers.AutoModelForCausalLM.from_pretrained(
        path / "float", quantization_config=transformers.TorchAoConfig(Int8WeightOnlyConfig())
    )
    quantised.save_pretrained(path / "int8", safe_serialization=False)
    return Made(place=path / "int8", reference=logits(quantised.eval()))


# --- running ----------------------------------------------------------------------------------------------------------


def run_variant(one: Variant, path: Path) -> Row:
    """Write, audit and load one variant."""
    try:
        made = one.make(path)
    except NotImplementedError as reason:
        return Row(name=one.name, what=one.what, not_run=str(reason))
    audit = CliRunner().invoke(app, ["audit", str(made.place), *made.options, "--output-format", "concise"])
    if audit.exception is not None and not isinstance(audit.exception, SystemExit):
        raise audit.exception
    lines = audit.output.replace(f"{path}/", "").replace(str(path), "DIR").splitlines()
    codes = tuple(dict.fromkeys(re.findall(r"^\S+: (BW\d+) (?:error|warning)", "\n".join(lines), re.MULTILINE)))
    row = Row(name=one.name, what=one.what, exit_code=audit.exit_code, codes=codes, line=lines[0])
    return _loaded(row, made)


def _loaded(row: Row, made: Made) -> Row:
    """The row with what transformers does."""
    config = made.load or made.place
    kind: Any = transformers.AutoModel if row.name == "sentence-transformers" else transformers.AutoModelForCausalLM
    values = {key: getattr(row, key) for key in row.__dataclass_fields__}
    try:
        model, found = kind.from_pretrained(config, output_loading_info=True)
    except Exception as error:  # a refusal is what transformers did
        first = " ".join(str(error).split()).replace(str(made.place), "DIR")
        return Row(**values | {"refusal": f"{type(error).__name__}: {first[:60]}"})
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    off = None
    if made.reference is not None and head is not None:
        off = float((logits(model.eval()) - made.reference).abs().max())
    return Row(**values | {"missing": len(found["missing_keys"]), "tied": tied, "off": off})


def table_of(rows: list[Row]) -> str:
    """The rows as a table in Markdown."""
    lines = ["| variant | exit code of `bowline audit` | first line | transformers |", "|---|---|---|---|"]
    for row in rows:
        if row.not_run is not None:
            lines.append(f"| {row.what} | not run: {row.not_run} | | |")
            continue
        line = row.line if len(row.line) <= LONGEST_LINE else row.line[:LONGEST_LINE] + " ..."
        line = line.replace("|", "\\|").replace("`", "'")
        lines.append(f"| {row.what} | {row.verdict} | `{line}` | {row.loaded} |")
    return "\n".join(lines)


def silence() -> None:
    """Silence the libraries, and limit torch to one thread."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*VARIANTS, []], help="only these variants")
    parser.add_argument("--report", type=Path, help="write the table as Markdown")
    arguments = parser.parse_args()
    silence()
    rows = []
    for one in VARIANTS.values():
        if not arguments.names or one.name in arguments.names:
            with tempfile.TemporaryDirectory() as path:
                rows.append(run_variant(one, Path(path)))
    text = table_of(rows)
    print(text)
    if arguments.report:
        arguments.report.write_text(text + "\n", encoding="utf-8")
    silent = [row.name for row in rows if row.silent]
    print("", f"clean, but loaded with missing tensors: {', '.join(silent) or 'none'}", sep="\n")
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
