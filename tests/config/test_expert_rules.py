"""Rules about experts, the ranks that expert parallelism takes, and multi-token prediction."""

import pytest

from tests.config.composing import experiment, give_gpus
from titan_exp.rules import violations

ASYNC_TP = ("parallelism.tp=2", "parallelism.async_tp=true")
BASE = ("model=qwen3_moe_debug", "cluster.device=cpu", "training.seq_len=64", "training.global_batch_size=24")
"""8 experts, of which a token uses 3."""
DEGREES = (BASE[0], "training.seq_len=64", "training.global_batch_size=48", "parallelism.dp_shard=1")
"""The same with 64 channels each; `parallelism.dp_shard=1` is the default of the table."""


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch):
    give_gpus(monkeypatch, 0)


@pytest.mark.parametrize(
    ("overrides", "field", "remedy"),
    [
        ([], "", ""),
        (["model.moe.active_experts=8"], "", ""),
        (["model.moe.active_experts=9"], "model.moe.active_experts", "use model.moe.active_experts=8 or less"),
        (["model.moe.ffn_dim=100"], "model.moe.ffn_dim", "model.moe.ffn_dim=96 or 128"),
        (["model.moe.groups=3"], "model.moe.groups", "model.moe.groups=1, 2 or 4"),
        (["model.moe.active_groups=2"], "model.moe.active_groups", "use model.moe.active_groups=1 or less"),
        (["model.moe.groups=4", "model.moe.active_groups=5"], "model.moe.active_groups", "active_groups=4"),
        (["model.moe.groups=4", "model.moe.active_groups=1"], "model.moe.active_groups", "active_groups=2, 3 or 4"),
        (["model.moe.groups=4", "model.moe.active_groups=2"], "", ""),
        (["model.moe.groups=8", "model.moe.group_score=top2_sum"], "model.moe.group_score", "group_score=max"),
        (["model.moe.balance.bias_rate=1e-3"], "model.moe.balance.bias_rate", "model.moe.router_bias=true"),
        (["model.moe.balance.loss=none"], "model.moe.balance.coefficient", "model.moe.balance.loss=sequence"),
        (["model.moe.balance.loss=none", "model.moe.balance.coefficient=0"], "", ""),
    ],
)
def test_experts(overrides: list[str], field: str, remedy: str):
    found = violations(experiment(*BASE, *overrides))
    assert [violation.field for violation in found] == ([field] if field else []), found
    assert remedy in "".join(violation.remedy for violation in found)


@pytest.mark.parametrize(
    ("overrides", "field", "remedy"),
    [
        (["model.mtp.depth=1"], "", ""),
        (["model.mtp.depth=1", "model.dense_layers=4", "parallelism.pp=2"], "", ""),
        (["model.mtp.depth=1", "model.tied_embeddings=true"], "model.mtp.depth", "model.tied_embeddings=false"),
        (["model.mtp.depth=64"], "model.mtp.depth", "model.mtp.depth=1"),
    ],
)
def test_multi_token_prediction(overrides: list[str], field: str, remedy: str):
    found = violations(experiment(*BASE, "model=deepseek_debug", *overrides))
    assert [violation.field for violation in found] == ([field] if field else []), found
    assert remedy in "".join(violation.remedy for violation in found)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.device=cpu"], "exchange no tokens"),
        (["cluster.device=cpu", "parallelism.ep=2", "parallelism.dp_shard=2"], "a CPU lacks"),
        (["cluster=slurm_h100", "parallelism.ep=2", "parallelism.dp_shard=2"], ""),
        (["cluster=slurm_h100", "parallelism.ep=2", "parallelism.dp_shard=2", "model.moe.experts=32"], ""),
        (
            ["cluster=slurm_h100", "parallelism.ep=2", "parallelism.dp_shard=2", "model.moe.experts=34"],
            "ep=2 gives each rank 17",
        ),
        (
            ["cluster=slurm_h100", "parallelism.ep=32", "parallelism.dp_shard=32", "model.moe.experts=64"],
            "ep=32 gives each rank 2",
        ),
        (["cluster=slurm_h100", "compile=blocks", "parallelism.ep=2", *ASYNC_TP], "run can have only one"),
    ],
)
def test_symmetric_memory(overrides: list[str], said: str):
    words = ["model=qwen3_moe_debug", "training.global_batch_size=96", "parallelism.token_exchange=symmetric_memory"]
    found = violations(experiment(*words, *overrides))
    assert [violation.field for violation in found] == (["parallelism.token_exchange"] if said else []), found
    assert all(said in violation.reason for violation in found)
    assert all("parallelism.token_exchange=all_to_all" in violation.remedy for violation in found)


@pytest.mark.parametrize(
    ("degrees", "field", "remedy"),
    [
        ("dp_shard=2 ep=2", "", ""),
        ("dp_shard=4 tp=2 ep=8", "", ""),
        ("dp_shard=2 tp=2 cp=2 ep=4 etp=2", "", ""),
        ("dp_shard=2 ep=4", "ep", "ep=1 or 2, or use parallelism.dp_shard=4"),
        ("dp_replicate=4 dp_shard=1 ep=2", "ep", "ep=1, or use parallelism.dp_shard=2"),
        ("pp=2 dp_shard=1 ep=2", "ep", "ep=1, or use parallelism.dp_shard=2"),
        ("dp_shard=2 tp=2 ep=4 etp=2", "ep", "ep=1 or 2, or use parallelism.dp_shard=4"),
        ("dp_shard=3 ep=3", "ep", "nearest: parallelism.ep=1"),
        ("dp_shard=16 ep=16", "ep", "nearest: parallelism.ep=2, 4 or 8"),
        ("dp_shard=4 etp=2", "etp", "parallelism.etp=1"),
        ("tp=4 etp=2", "etp", "parallelism.etp=1 or 4"),
        ("tp=2 etp=2", "", ""),
        ("tp=4 etp=4", "etp", "etp=1, or use model.moe.ffn_dim=128"),
        ("dp_shard=6 ep=2 tp=1", "ep", "parallelism.ep=1, or"),
        ("tp=2 sequence_parallel=false training.seq_len=63", "seq_len", "training.seq_len=62 or 64"),
        ("sequence_parallel=false training.seq_len=63", "", ""),
    ],
)
def test_degrees_of_experts(degrees: str, field: str, remedy: str):
    found = violations(experiment(*DEGREES, *words(degrees)))
    assert [violation.field.rpartition(".")[2] for violation in found] == [field] * bool(field)
    assert all(remedy in violation.remedy for violation in found)


def words(degrees: str) -> list[str]:
    """Overrides of degrees without the name of their group."""
    return [word if "." in word else f"parallelism.{word}" for word in degrees.split()]


@pytest.mark.parametrize("key", ["parallelism.ep", "parallelism.etp"])
@pytest.mark.parametrize("model", ["model=llama_debug", "model.architecture=tests.models.own_experts.Mixture"])
def test_a_model_without_experts_has_no_expert_parallelism(key: str, model: str):
    (found,) = violations(experiment(model, f"{key}=2", "parallelism.dp_shard=2"))
    assert found.field == key
    assert "no experts" in found.reason
    assert f"{key}=1" in found.remedy
