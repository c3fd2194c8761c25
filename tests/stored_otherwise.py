"""Very small models of Transformers, most of which are stored in another form than they are built in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

from blueprints import (
    IMAGES,
    Size,
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

IDS = torch.randint(4, 48, (2, 9), generator=torch.Generator().manual_seed(1))
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


_SIZE = Size(width=32, inner=40, expert_inner=24, layers=2, vocab=64)
_ENCODER, _EXPERTS = _SIZE.encoder, _SIZE.experts
_DECODER = {**_SIZE.decoder, "tie_word_embeddings": False}
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


_INDEXER = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "sliding_window": 4}

MIXTRAL = Form("mixtral", *mixtral(_SIZE), _TEXT, gathers=True)
DEEPSEEK_V3 = Form(  # a correction of the router in a buffer that is always float32
    "deepseek-v3", *deepseek_v3(_SIZE, experts=4), _TEXT, gathers=True
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
LLAMA = Form("llama", *llama(_SIZE), _TEXT, converts=False)
LLAMA_TIED = Form("llama-tied", *llama(_SIZE, tied=True), _TEXT, converts=False)
WAV2VEC2 = Form(  # a weight that is computed from two others, which used to have other names
    "wav2vec2", *wav2vec2(_SIZE, convolutions=2), {"input_values": SOUND}, converts=False
)
RESNET = Form(  # running statistics, and a count of batches in int64
    "resnet", *resnet([8, 16], depth=1), _IMAGE, converts=False
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
    Form("qwen3-moe", *qwen3_moe(_SIZE), _TEXT, gathers=True),
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
        "jamba", *jamba(_SIZE, use_mamba_kernels=False), _TEXT, gathers=True
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
    Form("gpt-oss", *gpt_oss(_SIZE), _TEXT, converts=False),
    QWEN3_VL,
    LLAMA,
    LLAMA_TIED,
    Form("gpt2", *gpt2(_SIZE, positions=32), _TEXT, converts=False),
    Form(  # one embedding at three places
        "t5", *t5(_SIZE, layers=2), {"input_ids": IDS, "decoder_input_ids": IDS.flip(1)}, converts=False
    ),
    RESNET,
    Form("vit", *vit(_SIZE), _IMAGE, converts=False),
    WAV2VEC2,
]
