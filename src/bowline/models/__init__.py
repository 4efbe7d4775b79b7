"""BERT, GPT-2, T5 and the tied LSTM, with the class names and tensor names of transformers."""

from __future__ import annotations

from bowline.models.auto import load, load_config
from bowline.models.bert import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
)
from bowline.models.common.model_config import PreTrainedConfig
from bowline.models.common.pretrained_model import PreTrainedModel
from bowline.models.common.tokenizer import Tokenizer
from bowline.models.generation import fill_mask
from bowline.models.gpt2 import GPT2Config, GPT2LMHeadModel, GPT2Model
from bowline.models.lstm import LSTMConfig, LSTMLMHeadModel, LSTMModel
from bowline.models.t5 import T5Config, T5EncoderModel, T5ForConditionalGeneration, T5Model

__all__ = [
    "BertConfig",
    "BertForMaskedLM",
    "BertForPreTraining",
    "BertForSequenceClassification",
    "BertModel",
    "GPT2Config",
    "GPT2LMHeadModel",
    "GPT2Model",
    "LSTMConfig",
    "LSTMLMHeadModel",
    "LSTMModel",
    "PreTrainedConfig",
    "PreTrainedModel",
    "T5Config",
    "T5EncoderModel",
    "T5ForConditionalGeneration",
    "T5Model",
    "Tokenizer",
    "fill_mask",
    "load",
    "load_config",
]
