"""Widths of small models for coordinate checks, as lists of overrides with one value per width."""

WIDTH = "model.dim"
"""Key of the width."""

SMALL_LLAMA = ("model=llama_debug", "training.seq_len=64", "training.global_batch_size=4")
"""Model and batch of a check without lists of the user's own."""

LLAMA_WIDTHS = (
    *(f"{WIDTH}=64,128,256,512", "model.heads=4,8,16,32", "model.kv_heads=2,4,8,16"),
    "model.ffn_dim=256,512,1024,2048",
)
"""Its widths, with heads of 16 features."""

EXPERT_WIDTHS = (
    *("model=qwen3_moe_debug", f"{WIDTH}=64,128,256", "model.heads=4,8,16", "model.kv_heads=2,4,8"),
    "model.moe.ffn_dim=64,128,256",
)
"""Widths of a model with experts, as an example."""
