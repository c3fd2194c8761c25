"""Very small models of Transformers, most of which are stored in another form than they are built in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

IDS = torch.randint(4, 48, (2, 9), generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
SOUND = torch.randn(2, 400, generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True, eq=False)
class Form:
    """A model, and how what is stored of it differs from what it is."""

    name: str
    model: Any
    config: Callable[[], Any]
    inputs: Mapping[str, Any]
    converts: bool = True
    """Whether tensors are stored in other numbers or shapes, and not only under other names."""
    gathers: bool = False
    """Whether what is converted lies in the checkpoint in a few stretches: fused experts."""

    def __str__(self) -> str:
        return self.name

    def build(self) -> Any:
        return self.model(self.config())


_WIDTHS = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4}
_TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER = {**_WIDTHS, **_TOKENS, "num_hidden_layers": 2, "max_position_embeddings": 64}
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "tie_word_embeddings": False}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
_TEXT = {"input_ids": IDS}
_IMAGE = {"pixel_values": IMAGES}


def _of(config: Any, **options: Any) -> Callable[[], Any]:
    return lambda: config(**options)


def _ernie_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    text = {
        **_DECODER,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": [24, 16],
        "moe_num_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse"],
        "rope_parameters": rope,
    }
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "intermediate_size": 40}
    tokens = ("image_token", "image_start_token", "image_end_token", "video_start_token", "video_end_token")
    return hf.Ernie4_5_VLMoeConfig(
        text_config=text,
        vision_config=vision,
        video_token_id=55,
        tie_word_embeddings=True,
        **{f"{token}_id": 50 + number for number, token in enumerate(tokens)},
    )


def _qwen3_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 4,
        "patch_size": 4,
        "intermediate_size": 40,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    return hf.Qwen3VLMoeConfig(
        text_config={**_DECODER, **_EXPERTS, "head_dim": 8, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=50,
        video_token_id=51,
        vision_start_token_id=52,
        vision_end_token_id=53,
    )


_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_INDEXER = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "sliding_window": 4}

MIXTRAL = Form(
    "mixtral", hf.MixtralForCausalLM, _of(hf.MixtralConfig, **_DECODER, num_local_experts=4), _TEXT, gathers=True
)
DEEPSEEK_V3 = Form(  # a correction of the router in a buffer that is always float32
    "deepseek-v3",
    hf.DeepseekV3ForCausalLM,
    _of(hf.DeepseekV3Config, **{**_DECODER, "num_key_value_heads": 4}, **_LATENT, **_ROUTED, n_group=2, topk_group=1),
    _TEXT,
    gathers=True,
)
DEEPSEEK_V4 = Form(  # int64 buffers, dozens of tensors that are always float32, every name changed
    "deepseek-v4",
    hf.DeepseekV4ForCausalLM,
    _of(
        hf.DeepseekV4Config,
        **{**_DECODER, "num_key_value_heads": 1},
        head_dim=16,
        qk_rope_head_dim=8,
        q_lora_rank=16,
        o_lora_rank=8,
        o_groups=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        **_INDEXER,
    ),
    _TEXT,
    gathers=True,
)
NOMIC_BERT = Form(  # one stored tensor for three of the model's: many to one on the way back
    "nomic-bert", hf.NomicBertForMaskedLM, _of(hf.NomicBertConfig, **_ENCODER), _TEXT, gathers=True
)
STEP_VISION = Form(  # the same, with rows that change places
    "step3p7-vision",
    hf.Step3p7VisionModel,
    _of(
        hf.Step3p7VisionConfig,
        hidden_size=96,  # more rows than would be gathered one by one
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        mlp_ratio=0.5,
    ),
    _IMAGE,
)
ERNIE_VL = Form(  # experts of two kinds in one list, transposed routers
    "ernie-vl-moe", hf.Ernie4_5_VLMoeForConditionalGeneration, _ernie_vl, _TEXT
)
QWEN3_VL = Form("qwen3-vl-moe", hf.Qwen3VLMoeForConditionalGeneration, _qwen3_vl, _TEXT, converts=False)
LLAMA = Form("llama", hf.LlamaForCausalLM, _of(hf.LlamaConfig, **_DECODER), _TEXT, converts=False)
LLAMA_TIED = Form(
    "llama-tied",
    hf.LlamaForCausalLM,
    _of(hf.LlamaConfig, **{**_DECODER, "tie_word_embeddings": True}),
    _TEXT,
    converts=False,
)
WAV2VEC2 = Form(  # a weight that is computed from two others, which used to have other names
    "wav2vec2",
    hf.Wav2Vec2ForCTC,
    _of(
        hf.Wav2Vec2Config,
        **_WIDTHS,
        num_hidden_layers=2,
        vocab_size=32,
        conv_dim=(16, 16),
        conv_kernel=(8, 4),
        conv_stride=(4, 2),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    ),
    {"input_values": SOUND},
    converts=False,
)
RESNET = Form(  # running statistics, and a count of batches in int64
    "resnet",
    hf.ResNetForImageClassification,
    _of(hf.ResNetConfig, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    _IMAGE,
    converts=False,
)


def _since_it_is_there(name: str, form: Callable[[], Form]) -> list[Form]:
    """A form that older versions of Transformers do not have."""
    return [form()] if hasattr(hf, name) else []


FORMS = [
    MIXTRAL,
    Form(
        "qwen2-moe",
        hf.Qwen2MoeForCausalLM,
        _of(hf.Qwen2MoeConfig, **_DECODER, **_EXPERTS, shared_expert_intermediate_size=24),
        _TEXT,
        gathers=True,
    ),
    Form(
        "qwen3-moe",
        hf.Qwen3MoeForCausalLM,
        _of(hf.Qwen3MoeConfig, **_DECODER, **_EXPERTS, head_dim=8),
        _TEXT,
        gathers=True,
    ),
    Form(
        "olmoe",
        hf.OlmoeForCausalLM,
        _of(hf.OlmoeConfig, **_DECODER, num_experts=4, num_experts_per_tok=2),
        _TEXT,
        gathers=True,
    ),
    DEEPSEEK_V3,
    DEEPSEEK_V4,
    Form(
        "glm4-moe", hf.Glm4MoeForCausalLM, _of(hf.Glm4MoeConfig, **_DECODER, **_ROUTED, head_dim=8), _TEXT, gathers=True
    ),
    Form("phimoe", hf.PhimoeForCausalLM, _of(hf.PhimoeConfig, **_DECODER, num_local_experts=4), _TEXT, gathers=True),
    Form(  # state space layers beside the experts
        "jamba",
        hf.JambaForCausalLM,
        _of(
            hf.JambaConfig,
            **_DECODER,
            num_experts=4,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=8,
            mamba_dt_rank=8,
            use_mamba_kernels=False,
        ),
        _TEXT,
        gathers=True,
    ),
    ERNIE_VL,
    NOMIC_BERT,
    *_since_it_is_there(
        "GteModel", lambda: Form("gte", hf.GteModel, _of(hf.GteConfig, **_ENCODER), _TEXT, gathers=True)
    ),
    STEP_VISION,
    *_since_it_is_there(
        "Molmo2TextModel",
        lambda: Form(  # a projection that is split in uneven parts
            "molmo2-text",
            hf.Molmo2TextModel,
            _of(
                hf.Molmo2TextConfig,
                vocab_size=64,
                hidden_size=32,
                intermediate_size=40,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
            ),
            _TEXT,
            gathers=True,
        ),
    ),
    Form(  # three convolutions in one
        "olmo-hybrid",
        hf.OlmoHybridForCausalLM,
        _of(
            hf.OlmoHybridConfig,
            **_DECODER,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
        _TEXT,
        gathers=True,
    ),
    Form(
        "granite-moe",
        hf.GraniteMoeForCausalLM,
        _of(hf.GraniteMoeConfig, **_DECODER, num_local_experts=4, num_experts_per_tok=2),
        _TEXT,
        converts=False,
    ),
    Form(
        "gpt-oss",
        hf.GptOssForCausalLM,
        _of(
            hf.GptOssConfig,
            **_DECODER,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=4,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        _TEXT,
        converts=False,
    ),
    QWEN3_VL,
    LLAMA,
    LLAMA_TIED,
    Form(
        "gpt2",
        hf.GPT2LMHeadModel,
        _of(hf.GPT2Config, **_TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=32),
        _TEXT,
        converts=False,
    ),
    Form(  # one embedding at three places
        "t5",
        hf.T5ForConditionalGeneration,
        _of(
            hf.T5Config,
            **_TOKENS,
            d_model=32,
            d_kv=8,
            d_ff=40,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        {"input_ids": IDS, "decoder_input_ids": IDS.flip(1)},
        converts=False,
    ),
    RESNET,
    Form(
        "vit",
        hf.ViTForImageClassification,
        _of(hf.ViTConfig, **_WIDTHS, num_hidden_layers=2, image_size=32, patch_size=8),
        _IMAGE,
        converts=False,
    ),
    WAV2VEC2,
]
