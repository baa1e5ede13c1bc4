"""What the fork server of ranks loads once and every rank would build for itself."""

from tests import warm_start
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment

for model in ("llama_debug", "qwen3_moe_debug", "deepseek_debug"):
    to_experiment(compose([f"model={model}"]))
warm_start.leave_files_to_the_kernel()
