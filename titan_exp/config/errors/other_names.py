"""Names that other trainers give to keys, for suggestions."""

from titan_exp.config.schema.schema import value_keys

OTHER_NAMES = {
    "activation_checkpoint.mode": ("gradient_checkpointing", "activation_checkpointing", "recompute_granularity"),
    "checkpoint.continue_from": ("resume", "resume_from", "resume_from_checkpoint", "load", "ckpt_path"),
    "checkpoint.every": ("save_steps", "save_interval", "save_every", "checkpoint_interval", "interval", "every_steps"),
    "cluster.gpus_per_node": ("gpus", "nproc_per_node", "num_gpus", "ngpus"),
    "cluster.nodes": ("nnodes", "num_nodes"),
    "experiment.name": ("run_name", "exp_name"),
    "lr_schedule.warmup_steps": ("warmup", "num_warmup_steps", "lr_warmup_iters"),
    "model.context": ("max_position_embeddings", "max_seq_len"),
    "model.dim": ("hidden_size", "hidden_dim", "d_model", "n_embd", "embed_dim"),
    "model.ffn_dim": ("intermediate_size", "ffn_hidden_size", "d_ff"),
    "model.heads": ("num_attention_heads", "n_heads", "n_head", "num_heads"),
    "model.kv_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "num_query_groups"),
    "model.layers": ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth"),
    "model.moe.active_experts": ("num_experts_per_tok", "num_experts_per_token", "top_k", "topk", "router_topk"),
    "model.moe.active_groups": ("topk_group", "num_limited_groups", "router_group_topk"),
    "model.moe.balance.bias_rate": ("load_balance_coeff", "router_bias_update_rate", "bias_update_speed"),
    "model.moe.balance.coefficient": ("router_aux_loss_coef", "aux_loss_coef", "aux_loss_alpha", "aux_loss_coeff"),
    "model.moe.balance.loss": ("load_balancing_type", "aux_loss", "aux_loss_type"),
    "model.moe.balance.z_loss": ("router_z_loss_coef", "z_loss_coeff"),
    "model.moe.experts": ("n_routed_experts", "num_local_experts", "num_moe_experts", "n_experts"),
    "model.moe.ffn_dim": ("moe_intermediate_size", "moe_inter_dim", "moe_ffn_hidden_size"),
    "model.moe.groups": ("n_group", "num_expert_groups", "n_expert_groups", "router_num_groups"),
    "model.moe.normalized": ("norm_topk_prob", "route_norm"),
    "model.moe.scale": ("routed_scaling_factor", "route_scale", "router_topk_scaling_factor"),
    "model.moe.score": ("scoring_func", "score_func", "score_function"),
    "model.moe.shared_experts": ("n_shared_experts", "num_shared_experts"),
    "model.mtp.depth": ("num_nextn_predict_layers", "mtp_num_layers", "num_mtp_modules"),
    "model.mtp.weight": ("mtp_loss_scaling_factor", "mtp_loss_weight"),
    "optimizer.lr": ("learning_rate",),
    "parallelism.cp": ("context_parallel_size", "context_parallel", "cp_size"),
    "parallelism.dp_replicate": ("data_parallel_size", "ddp"),
    "parallelism.dp_shard": ("zero_stage", "fsdp_size"),
    "parallelism.ep": ("expert_parallel_size", "expert_model_parallel_size", "expert_parallel", "ep_size"),
    "parallelism.etp": ("expert_tensor_parallel_size", "expert_tensor_parallel_degree", "expert_tensor_parallel"),
    "parallelism.pp": ("pipeline_parallel_size", "pipeline_model_parallel_size", "pipeline_parallel", "pp_size"),
    "parallelism.token_exchange": ("expert_parallel_comm_backend", "moe_token_dispatcher_type", "token_dispatcher"),
    "parallelism.tp": ("tensor_parallel_size", "tensor_model_parallel_size", "tensor_parallel", "tp_size"),
    "paths.runs": ("output_dir", "out_dir", "save_dir"),
    "tracking.log_every": ("logging_steps", "log_interval", "log_freq"),
    "training.batch_ramp": ("rampup_batch_size", "batch_size_warmup", "global_batch_size_ramp"),
    "training.evaluate_every": ("eval_steps", "eval_interval", "eval_every"),
    "training.global_batch_size": ("gradient_accumulation_steps", "train_batch_size", "grad_accum"),
    "training.max_grad_norm": ("grad_clip", "gradient_clipping", "clip_grad", "max_norm"),
    "training.micro_batch_size": ("per_device_train_batch_size", "per_device_batch_size", "local_batch_size"),
    "training.mixed_precision": ("bf16", "fp16", "dtype", "precision"),
    "training.seq_len": ("sequence_length", "seq_length", "block_size", "max_length"),
    "training.steps": ("epochs", "num_train_epochs", "iters", "train_iters", "num_steps"),
}
"""Names in Hugging Face's Trainer, torchtitan, Megatron and nanoGPT, by our key."""


def other_names(typed: str) -> list[str]:
    """Key that another trainer calls like the last part of the typed key; empty if there is none, or for a key."""
    if typed in value_keys():
        return []
    name = typed.rpartition(".")[2].lower()
    return [key for key, names in OTHER_NAMES.items() if name in names and key in value_keys()]
