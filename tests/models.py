"""Tiny models of many Transformers architectures, with random weights and the inputs to call them with.

Their embeddings, heads and blocks are just large enough to become units of their own, as they do at full size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import nn

from blueprints import (
    IMAGES,
    Size,
    blueprint,
    deepseek_v3,
    gpt2,
    gpt_oss,
    jamba,
    llama,
    mixtral,
    qwen3_moe,
    resnet,
    t5,
    vit,
    wav2vec2,
)

VOCAB = 4160  # × 64 float32 is a little over 1 MiB, so that an embedding is a unit

IDS = torch.randint(4, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[1] * 12, [0] * 3 + [1] * 9])  # the second sequence is padded on the left
SOUND = torch.randn(2, 800, generator=torch.Generator().manual_seed(3))
SPECTRA = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(4))


@dataclass(frozen=True)
class Architecture:
    """One architecture: how to build it, what to call it with, and how many units it has at the least."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Mapping[str, Any]
    units: int = 4
    edits_itself: bool = False
    """Whether its forward writes to its own weights, outside training too."""

    def __str__(self) -> str:
        return self.name


def randomized(model: nn.Module) -> nn.Module:
    """`model` with no bias left at 0 and no norm at 1: tensors that were lost or mixed up would not show."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.add_(torch.rand_like(buffer))
    return model


_SIZE = Size(width=64, inner=96, expert_inner=48, layers=4, vocab=VOCAB)
_WIDTHS, _TOKENS = _SIZE.widths, _SIZE.tokens
_DECODER, _ENCODER, _VISION = _SIZE.decoder, _SIZE.encoder, _SIZE.vision
_STATE_SPACE = {**_TOKENS, "hidden_size": 64, "num_hidden_layers": 4, "state_size": 8}
_TWO_STACKS = {
    **_TOKENS,
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "decoder_start_token_id": 3,
}

_TEXT = {"input_ids": IDS, "attention_mask": MASK}
_TEXT_TO_TEXT = {"input_ids": IDS, "attention_mask": MASK.flip(1), "decoder_input_ids": IDS.flip(1)[:, :8]}
_IMAGE = {"pixel_values": IMAGES}


def _of(model: Any, config: Any, **options: Any) -> Callable[[], nn.Module]:
    return blueprint(model, config, **options).build


def _zamba2() -> nn.Module:
    return hf.Zamba2ForCausalLM(
        hf.Zamba2Config(
            **{**_DECODER, "num_hidden_layers": 6, "num_key_value_heads": 4},
            layers_block_type=["mamba", "hybrid"] * 3,
            mamba_d_state=8,
            mamba_headdim=16,
            n_mamba_heads=8,
            mamba_ngroups=1,
            chunk_size=4,
            num_mem_blocks=2,  # the second of these attends in two of the layers, with the same weights
            use_mem_rope=True,
            adapter_rank=8,
        )
    )


def _llava() -> nn.Module:
    vision = hf.CLIPVisionConfig(**{**_VISION, "num_hidden_layers": 3})
    text = hf.LlamaConfig(**_DECODER)
    return hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(text_config=text, vision_config=vision, image_token_index=3, image_seq_length=16)
    )


DENSE = [
    Architecture("llama", llama(_SIZE).build, _TEXT, units=6),
    Architecture("llama-tied", llama(_SIZE, tied=True).build, _TEXT, units=5),
    Architecture(  # Conv1D: weights that are stored the other way round
        "gpt2",
        gpt2(_SIZE, positions=64).build,
        _TEXT,
        units=5,
    ),
    Architecture("qwen3", _of(hf.Qwen3ForCausalLM, hf.Qwen3Config, **_DECODER, head_dim=16), _TEXT, units=6),
    Architecture(  # tied, a scaled embedding with a buffer, and two kinds of attention, each with its cache
        "gemma3",
        _of(
            hf.Gemma3ForCausalLM,
            hf.Gemma3TextConfig,
            **_DECODER,
            head_dim=16,
            sliding_window=4,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        ),
        _TEXT,
        units=5,
    ),
    Architecture(
        "xlnet",
        _of(hf.XLNetLMHeadModel, hf.XLNetConfig, **_TOKENS, d_model=64, n_layer=4, n_head=4, d_inner=96),
        _TEXT,
        units=5,
    ),
]

ENCODERS = [
    Architecture(  # a tied bias beside the tied weight
        "bert",
        _of(hf.BertForMaskedLM, hf.BertConfig, **_ENCODER, attn_implementation="eager"),
        {**_TEXT, "output_attentions": True},
        units=5,
    ),
    Architecture(  # one layer that runs three times, large enough for its linear layers to be units
        "albert",
        _of(
            hf.AlbertForMaskedLM,
            hf.AlbertConfig,
            **{**_ENCODER, "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 3},
            embedding_size=64,
        ),
        _TEXT,
        units=7,
    ),
    Architecture(  # relative positions, whose embedding is used without being called
        "deberta",
        _of(
            hf.DebertaV2ForMaskedLM,
            hf.DebertaV2Config,
            **_ENCODER,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            position_biased_input=False,
        ),
        _TEXT,
        units=5,
    ),
]

ENCODER_DECODERS = [
    Architecture(  # one embedding at three places, and a position bias that later layers take from the first
        "t5",
        t5(_SIZE, layers=3).build,
        _TEXT_TO_TEXT,
        units=7,
    ),
    Architecture(
        "bart",
        _of(
            hf.BartForConditionalGeneration,
            hf.BartConfig,
            **_TWO_STACKS,
            max_position_embeddings=64,
            attn_implementation="eager",
        ),
        {**_TEXT_TO_TEXT, "output_attentions": True},
        units=7,
    ),
    Architecture(  # sinusoidal positions, and a bias that is a buffer
        "marian",
        _of(hf.MarianMTModel, hf.MarianConfig, **_TWO_STACKS, max_position_embeddings=64),
        _TEXT_TO_TEXT,
        units=7,
    ),
    Architecture(
        "m2m100",
        _of(hf.M2M100ForConditionalGeneration, hf.M2M100Config, **_TWO_STACKS, max_position_embeddings=64),
        _TEXT_TO_TEXT,
        units=7,
    ),
]

EXPERTS = [
    Architecture("mixtral", mixtral(_SIZE).build, _TEXT, units=6),
    Architecture(
        "qwen3-moe",
        qwen3_moe(_SIZE).build,
        _TEXT,
        units=6,
    ),
    Architecture(  # latent attention, shared experts, a dense first layer, a router's correction in a buffer
        "deepseek-v3",
        deepseek_v3(_SIZE, experts=8).build,
        _TEXT,
        units=6,
    ),
    Architecture(  # attention sinks: parameters next to linear layers
        "gpt-oss",
        gpt_oss(_SIZE).build,
        _TEXT,
        units=6,
    ),
]

STATE_SPACE = [
    Architecture("mamba", _of(hf.MambaForCausalLM, hf.MambaConfig, **_STATE_SPACE), _TEXT, units=5),
    Architecture(
        "mamba2",
        _of(
            hf.Mamba2ForCausalLM,
            hf.Mamba2Config,
            **_STATE_SPACE,
            num_heads=8,
            head_dim=16,
            n_groups=1,
            chunk_size=4,
        ),
        _TEXT,
        units=5,
    ),
    Architecture("falcon-mamba", _of(hf.FalconMambaForCausalLM, hf.FalconMambaConfig, **_STATE_SPACE), _TEXT, units=5),
    Architecture(  # divides weights of its later blocks by two, for good, when it first runs in eval
        "rwkv",
        _of(
            hf.RwkvForCausalLM,
            hf.RwkvConfig,
            **_TOKENS,
            hidden_size=64,
            attention_hidden_size=64,
            num_hidden_layers=4,
            rescale_every=2,
        ),
        {"input_ids": IDS},
        units=6,
        edits_itself=True,
    ),
    Architecture(
        "recurrent-gemma",
        _of(
            hf.RecurrentGemmaForCausalLM,
            hf.RecurrentGemmaConfig,
            **_WIDTHS,
            **_TOKENS,
            num_hidden_layers=3,
            lru_width=64,
            attention_window_size=8,
        ),
        _TEXT,
        units=4,
    ),
]

HYBRIDS = [
    Architecture(  # attention, state space and experts in one model
        "jamba",
        jamba(_SIZE).build,
        _TEXT,
        units=6,
    ),
    Architecture(
        "bamba",
        _of(
            hf.BambaForCausalLM,
            hf.BambaConfig,
            **_DECODER,
            attn_layer_indices=[1, 3],
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_d_state=8,
            mamba_n_groups=1,
            mamba_chunk_size=4,
        ),
        _TEXT,
        units=6,
    ),
    Architecture("zamba2", _zamba2, _TEXT, units=7),
    Architecture(
        "lfm2",
        _of(hf.Lfm2ForCausalLM, hf.Lfm2Config, **_DECODER, full_attn_idxs=[1, 3], block_multiple_of=16),
        _TEXT,
        units=5,
    ),
]

VISION = [
    Architecture(  # a class token and positions beside the patches' convolution
        "vit", vit(_SIZE).build, _IMAGE
    ),
    Architecture(
        "convnext",
        _of(hf.ConvNextForImageClassification, hf.ConvNextConfig, hidden_sizes=[16, 32, 48, 64], depths=[2, 2, 2, 2]),
        _IMAGE,
    ),
    Architecture(
        "swin",
        _of(
            hf.SwinForImageClassification,
            hf.SwinConfig,
            embed_dim=16,
            depths=[2, 2, 2],
            num_heads=[2, 4, 4],
            image_size=32,
            patch_size=2,
            window_size=4,
        ),
        _IMAGE,
        units=3,
    ),
    Architecture(  # running statistics
        "resnet",
        resnet([16, 32, 48], depth=2).build,
        _IMAGE,
    ),
    Architecture(
        "segformer",
        _of(
            hf.SegformerForSemanticSegmentation,
            hf.SegformerConfig,
            hidden_sizes=[16, 32, 48, 64],
            depths=[2, 2, 2, 2],
            num_attention_heads=[1, 2, 4, 4],
            decoder_hidden_size=32,
        ),
        _IMAGE,
    ),
    Architecture(
        "dinov2",
        _of(
            hf.Dinov2Model,
            hf.Dinov2Config,
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            mlp_ratio=2,
            image_size=32,
            patch_size=8,
        ),
        _IMAGE,
    ),
]

AUDIO = [
    Architecture(
        "whisper",
        _of(
            hf.WhisperForConditionalGeneration,
            hf.WhisperConfig,
            **_TWO_STACKS,
            num_mel_bins=8,
            max_source_positions=16,
            max_target_positions=32,
        ),
        {"input_features": SPECTRA, "decoder_input_ids": IDS[:, :8]},
        units=7,
    ),
    Architecture(  # a weight that is computed from two others whenever it is used
        "wav2vec2", wav2vec2(_SIZE, convolutions=3).build, {"input_values": SOUND}
    ),
    Architecture(
        "hubert", _of(hf.HubertModel, hf.HubertConfig, **_SIZE.speech(convolutions=3)), {"input_values": SOUND}
    ),
]

MULTIMODAL = [
    Architecture(
        "clip",
        _of(
            hf.CLIPModel,
            hf.CLIPConfig,
            text_config={**_ENCODER, "num_hidden_layers": 3},
            vision_config={**_VISION, "num_hidden_layers": 3},
            projection_dim=32,
        ),
        {**_TEXT, **_IMAGE},
        units=7,
    ),
    Architecture(
        "llava",
        _llava,
        {"input_ids": torch.cat([torch.full((2, 16), 3), IDS], 1), **_IMAGE},
        units=9,
    ),
]

ARCHITECTURES = [
    *DENSE,
    *ENCODERS,
    *ENCODER_DECODERS,
    *EXPERTS,
    *STATE_SPACE,
    *HYBRIDS,
    *VISION,
    *AUDIO,
    *MULTIMODAL,
]
