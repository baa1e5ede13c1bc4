"""Tiny models of transformers: `config.json` of classes that are not families of ours."""

import json
from pathlib import Path

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}

CLASSES = {
    # A scaled, tied embedding; norms that add 1 to their weight; GELU; fewer key and value heads.
    "gemma": {"model_type": "gemma", "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
    # Fused query, key and value by head; biases; norms with biases; parallel residual; rotation of some features.
    "gpt_neox": {"model_type": "gpt_neox", "tie_word_embeddings": False, "hidden_act": "gelu", "rotary_pct": 0.25},
    # Norms over whole queries and keys, for which the plan gathers their outputs.
    "olmo2": {"model_type": "olmo2", "num_key_value_heads": 2, "tie_word_embeddings": False},
    # Fused linears that the class slices, gathered as well.
    "phi3": {"model_type": "phi3", "num_key_value_heads": 2, "tie_word_embeddings": False},
    # A sliding window shorter than the sequences.
    "mistral": {
        "model_type": "mistral",
        "num_key_value_heads": 2,
        "sliding_window": 16,
        "head_dim": 16,
        "tie_word_embeddings": False,
    },
    # Stacked experts, with norms over heads.
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    # A plan without attention, a shared expert, a dense first layer.
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "tie_word_embeddings": False,
    },
    # A gated delta rule with a convolution, beside attention with norms over whole queries and keys.
    "olmo_hybrid": {
        "model_type": "olmo_hybrid",
        "layer_types": ["linear_attention", "full_attention"],
        "num_key_value_heads": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "tie_word_embeddings": False,
    },
    # The same, whose plan gathers the outputs of one linear after the other.
    "qwen3_5_text": {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"],
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    # A short convolution.
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    # A state-space model in chunks of 256 tokens.
    "bamba": {
        "model_type": "bamba",
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
    },
    "t5": {"model_type": "t5", "is_encoder_decoder": True, "d_model": 64, "num_layers": 2, "n_positions": 512},
    "gpt2": {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 512, "resid_pdrop": 0.1},
}


def write_config(folder: Path, name: str, **changes: object) -> Path:
    """Write a tiny class's `config.json` into a folder of its name, and return that."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps({**SIZES, **CLASSES[name], **changes}))
    return target
