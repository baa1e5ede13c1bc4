"""Log lines about options that cost speed."""

import pytest

from tests.config.composing import experiment, give_gpus
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.trainer.profiling.slow_options import slower_options


def said(*overrides: str) -> list[str]:
    return list(slower_options(resolve_layout(experiment("model=llama3_8b", *overrides), 1)))


@pytest.mark.parametrize("gpus", [0, 8])
def test_defaults_have_no_slow_option(gpus: int, monkeypatch: pytest.MonkeyPatch):
    give_gpus(monkeypatch, gpus)
    assert said() == []
    assert said("compile=all", "quantization=none", "training.mixed_precision=bf16") == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["parallelism.dp_shard=12", "data.streaming=true"],
            "Use data.virtual_shards=60 or 72 to read it once, in another order",
        ),
        (["parallelism.dp_shard=128", "data.source=my.Own"], "Use data.virtual_shards=128 to read it once"),
        (["parallelism.dp_shard=12", "data=tokens"], None),
        (["parallelism.dp_shard=12"], None),
        (["parallelism.dp_shard=16", "data.streaming=true"], None),
        (["parallelism.tp=2", "model.ffn_dim=160"], "groups of 32 of the 160 feed-forward channels"),
        (["parallelism.tp=2"], None),
        (["optimizer.implementation=foreach"], "optimizer.implementation=auto, which takes one"),
        (["optimizer.implementation=triton"], None),
        (["optimizer.state_precision=int8"], "parameters one by one"),
        (["optimizer.state_precision=bf16"], None),
        (
            ["optimizer.state_precision=bf16", "optimizer.implementation=fused"],
            "optimizer.implementation=auto, which has one for bf16 moments",
        ),
        (["quantization=float8_rowwise"], None),
        (["quantization=float8_rowwise", "quantization.smallest_gemm=0"], None),
        (
            ["model=llama3_2_1b", "quantization=float8_rowwise", "quantization.smallest_gemm=0"],
            "quantizes 64 linears with fewer than 4096",
        ),
        (["quantization=mxfp8", "quantization.emulate=true"], "runs in emulation here"),
        (["model.attention_backend=math"], "model.attention_backend=auto"),
        (["model.attention_backend=efficient"], None),
        (["model.attention_backend=efficient", "training.mixed_precision=bf16"], "model.attention_backend=auto"),
        (["compile=none"], "compile=blocks to fuse them"),
        (["training.mixed_precision=bf16", "training.fp32_modules=[blocks.*.attention_norm]"], None),
        (["compile=blocks", "compile.backend=aot_eager"], "compile.backend=inductor"),
        (["compile.cuda_graphs=true"], "unless kernels take longer to launch than to run"),
        (["training.deterministic=true"], "training.deterministic=false"),
        (["parallelism.tp=8"], None),
        (["parallelism.tp=16"], "parallelism.tp=8 or less to stay within a node"),
    ],
)
def test_on_gpus(overrides: list[str], says: str | None, monkeypatch: pytest.MonkeyPatch):
    give_gpus(monkeypatch, 8)
    found = said(*overrides)
    assert len(found) == (says is not None), found
    assert says is None or says in found[0]


def test_on_a_cpu_recipes_are_emulated(monkeypatch: pytest.MonkeyPatch):
    give_gpus(monkeypatch, 0)
    assert "quantization=none" in said("quantization=float8_tensorwise")[0]
