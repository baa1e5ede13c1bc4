"""Expert parallelism rules: refused degrees, and the nearest that work."""

import pytest

from tests.config.composing import experiment, give_gpus
from titan_exp.rules import violations

MOE = ("model=qwen3_moe_debug", "training.seq_len=64", "training.micro_batch_size=null")
"""Eight experts of 64 channels."""


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch):
    give_gpus(monkeypatch, 0)


@pytest.mark.parametrize(
    ("layout", "field", "reason", "remedy"),
    [
        ("dp_shard=2 ep=2", "", "", ""),
        ("dp_shard=4 tp=2 ep=8", "", "", ""),
        ("dp_shard=2 tp=2 cp=2 ep=4 etp=2", "", "", ""),
        ("dp_shard=2 ep=4", "ep", "cp · tp = 2, which it does not divide", "ep=1 or 2; or parallelism.dp_shard=4"),
        ("dp_replicate=4 dp_shard=1 ep=2", "ep", "= 1, which", "ep=1; or parallelism.dp_shard=2"),
        ("pp=2 dp_shard=1 ep=2", "ep", "= 1, which", "ep=1; or parallelism.dp_shard=2"),
        ("dp_shard=2 tp=2 ep=4 etp=2", "ep", "etp · ep = 8 does not divide", "ep=1 or 2; or parallelism.dp_shard=4"),
        ("dp_shard=3 ep=3", "ep", "8 experts cannot be divided evenly among 3", "nearest: parallelism.ep=1"),
        ("dp_shard=16 ep=16", "ep", "8 experts cannot be divided", "nearest: parallelism.ep=2, 4 or 8"),
        ("dp_shard=4 etp=2", "etp", "equal to parallelism.tp=1", "parallelism.etp=1"),
        ("tp=4 etp=2", "etp", "equal to parallelism.tp=4", "parallelism.etp=1 or 4"),
        ("tp=2 etp=2", "", "", ""),
        ("tp=4 etp=4", "etp", "in groups of 32", "etp=1; or model.moe.ffn_dim=128"),
        (
            "dp_shard=6 ep=2 tp=1",
            "ep",
            "3 shards divide neither the experts of a rank nor the channels",
            "parallelism.ep=1; or",
        ),
        ("tp=2 sequence_parallel=false seq_len=63", "seq_len", "route an equal part", "training.seq_len=62 or 64"),
        ("sequence_parallel=false seq_len=63", "", "", ""),
    ],
)
def test_degrees_of_experts(layout: str, field: str, reason: str, remedy: str):
    words = [f"{'training' if word.startswith('seq_len') else 'parallelism'}.{word}" for word in layout.split()]
    shards = [] if "dp_shard" in layout else ["parallelism.dp_shard=1"]
    found = violations(experiment(*MOE, "training.global_batch_size=48", *shards, *words))
    assert [violation.field.rpartition(".")[2] for violation in found] == [field] * bool(field)
    for violation in found:
        assert reason in violation.reason
        assert remedy in violation.remedy


@pytest.mark.parametrize("key", ["parallelism.ep", "parallelism.etp"])
@pytest.mark.parametrize("model", ["model=llama_debug", "model.architecture=tests.models.own_experts.Mixture"])
def test_a_model_without_experts_has_no_expert_parallelism(key: str, model: str):
    (found,) = violations(experiment(model, f"{key}=2", "parallelism.dp_shard=2"))
    assert found.field == key
    assert "no experts" in found.reason
    assert f"{key}=1" in found.remedy
