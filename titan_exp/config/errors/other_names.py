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
    "optimizer.lr": ("learning_rate",),
    "parallelism.cp": ("context_parallel_size", "context_parallel", "cp_size"),
    "parallelism.dp_replicate": ("data_parallel_size", "ddp"),
    "parallelism.dp_shard": ("zero_stage", "fsdp_size"),
    "parallelism.pp": ("pipeline_parallel_size", "pipeline_model_parallel_size", "pipeline_parallel", "pp_size"),
    "parallelism.tp": ("tensor_parallel_size", "tensor_model_parallel_size", "tensor_parallel", "tp_size"),
    "paths.runs": ("output_dir", "out_dir", "save_dir"),
    "tracking.log_every": ("logging_steps", "log_interval", "log_freq"),
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
    """Key that another trainer calls like the last part of the typed key; empty if there is none."""
    name = typed.rpartition(".")[2].lower()
    return [key for key, names in OTHER_NAMES.items() if name in names and key in value_keys()]
