"""Architectures of Transformers that several files of tests use: written once, and built in the size that is wanted."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import nn

Options = dict[str, Any]

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
"""What those that see are called with."""

_HEADS = 4


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a tiny model is, and from there the options that many architectures understand."""

    width: int
    inner: int
    """The width within a feed-forward layer."""
    expert_inner: int
    """The same within one of several experts."""
    layers: int
    vocab: int

    @property
    def head(self) -> int:
        return self.width // _HEADS

    @property
    def widths(self) -> Options:
        return {"hidden_size": self.width, "intermediate_size": self.inner, "num_attention_heads": _HEADS}

    @property
    def tokens(self) -> Options:
        return {"vocab_size": self.vocab, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

    @property
    def encoder(self) -> Options:
        return {**self.widths, **self.tokens, "num_hidden_layers": self.layers, "max_position_embeddings": 64}

    @property
    def decoder(self) -> Options:
        return {**self.encoder, "num_key_value_heads": 2}

    @property
    def experts(self) -> Options:
        return {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": self.expert_inner}

    @property
    def vision(self) -> Options:
        return {**self.widths, "num_hidden_layers": self.layers, "image_size": 32, "patch_size": 8}

    def speech(self, convolutions: int) -> Options:
        """For those that hear; more convolutions make fewer frames."""
        return {
            **self.widths,
            "num_hidden_layers": self.layers,
            "conv_dim": (self.width // 2,) * convolutions,
            "conv_kernel": (8, 4, 4)[:convolutions],
            "conv_stride": (4, 2, 2)[:convolutions],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
        }


class Blueprint(NamedTuple):
    """A class of models, and how the config of one is made."""

    model: Any
    config: Callable[[], Any]

    def build(self) -> nn.Module:
        built = self.model(self.config())
        assert isinstance(built, nn.Module)
        return built


def blueprint(model: Any, config: Any, **options: Any) -> Blueprint:
    return Blueprint(model, partial(config, **options))


def llama(size: Size, *, tied: bool = False) -> Blueprint:
    return blueprint(hf.LlamaForCausalLM, hf.LlamaConfig, **size.decoder, tie_word_embeddings=tied)


def gpt2(size: Size, *, positions: int) -> Blueprint:
    sizes = {"n_embd": size.width, "n_layer": size.layers, "n_head": _HEADS, "n_positions": positions}
    return blueprint(hf.GPT2LMHeadModel, hf.GPT2Config, **size.tokens, **sizes)


def t5(size: Size, *, layers: int) -> Blueprint:
    return blueprint(
        hf.T5ForConditionalGeneration,
        hf.T5Config,
        **size.tokens,
        d_model=size.width,
        d_kv=size.head,
        d_ff=size.inner,
        num_layers=layers,
        num_heads=_HEADS,
        decoder_start_token_id=0,
    )


def mixtral(size: Size) -> Blueprint:
    return blueprint(hf.MixtralForCausalLM, hf.MixtralConfig, **size.decoder, num_local_experts=4)


def qwen3_moe(size: Size) -> Blueprint:
    return blueprint(hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, **size.decoder, **size.experts, head_dim=size.head)


def deepseek_v3(size: Size, *, experts: int) -> Blueprint:
    return blueprint(
        hf.DeepseekV3ForCausalLM,
        hf.DeepseekV3Config,
        **{**size.decoder, "num_key_value_heads": _HEADS},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=size.head,
        n_routed_experts=experts,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=size.expert_inner,
        first_k_dense_replace=1,
    )


def gpt_oss(size: Size) -> Blueprint:
    return blueprint(
        hf.GptOssForCausalLM,
        hf.GptOssConfig,
        **size.decoder,
        head_dim=size.head,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def jamba(size: Size, **options: Any) -> Blueprint:
    return blueprint(
        hf.JambaForCausalLM,
        hf.JambaConfig,
        **size.decoder,
        num_experts=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=8,
        **options,
    )


def vit(size: Size) -> Blueprint:
    return blueprint(hf.ViTForImageClassification, hf.ViTConfig, **size.vision)


def resnet(stages: list[int], *, depth: int) -> Blueprint:
    return blueprint(
        hf.ResNetForImageClassification,
        hf.ResNetConfig,
        embedding_size=stages[0],
        hidden_sizes=stages,
        depths=[depth] * len(stages),
        layer_type="basic",
    )


def wav2vec2(size: Size, *, convolutions: int) -> Blueprint:
    return blueprint(hf.Wav2Vec2ForCTC, hf.Wav2Vec2Config, **size.speech(convolutions), vocab_size=32)
