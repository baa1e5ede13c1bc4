from pathlib import Path

import pytest

from tests.config.composing import experiment, give_gpus
from titan_exp.config import devices as machine
from titan_exp.config.devices import device_type, offered_devices
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.training import batch_size_at, sequences_after, steps_for
from titan_exp.config.layout.resolved_layout import ResolvedLayout, compilation, resolve_layout, with_automatic_kernels
from titan_exp.rules import violations


def laid_out(*overrides: str) -> ResolvedLayout:
    return ResolvedLayout.of(resolve_layout(experiment(*overrides), 1))


@pytest.mark.parametrize(
    ("gpus", "overrides", "device", "offered"),
    [
        (0, [], "cpu", 1),
        (8, [], "cuda", 8),
        (8, ["cluster.device=cpu"], "cpu", 1),
        (8, ["cluster.gpus_per_node=2"], "cuda", 2),
        (8, ["cluster.gpus_per_node=2", "cluster.nodes=3"], "cuda", 6),
        (0, ["cluster.device=cuda"], "cuda", 0),
    ],
)
def test_what_the_cluster_offers(
    gpus: int, overrides: list[str], device: str, offered: int, monkeypatch: pytest.MonkeyPatch
):
    give_gpus(monkeypatch, gpus)
    cluster = experiment(*overrides).cluster
    assert (device_type(cluster), offered_devices(cluster)) == (device, offered)


@pytest.mark.parametrize(
    ("overrides", "offered", "shard", "world"),
    [
        ([], 1, 1, 1),
        ([], 8, 8, 8),
        (["parallelism.dp_replicate=2"], 8, 4, 8),
        (["parallelism.dp_replicate=2"], 1, 1, 2),
        (["parallelism.dp_shard=4"], 1, 4, 4),
        (["parallelism.dp_shard=2", "parallelism.dp_replicate=3"], 8, 2, 6),
    ],
)
def test_resolving(overrides: list[str], offered: int, shard: int, world: int):
    resolved = resolve_layout(experiment(*overrides), offered)
    assert (resolved.parallelism.dp_shard, ResolvedLayout.of(resolved).world_size) == (shard, world)
    assert resolve_layout(resolved, 5) == resolved


def test_degrees_that_leave_a_remainder_are_refused():
    with pytest.raises(UserError, match="does not divide the 8 devices"):
        resolve_layout(experiment("parallelism.dp_replicate=3"), 8)


def test_the_global_batch_is_divided():
    run = experiment("parallelism=hsdp", "training.global_batch_size=64", "training.micro_batch_size=4")
    layout = ResolvedLayout.of(run)
    assert (layout.dp_degree, layout.micro_batch_size, layout.gradient_accumulation) == (4, 4, 4)
    whole = experiment("parallelism=hsdp", "training.global_batch_size=64")
    assert (ResolvedLayout.of(whole).micro_batch_size, ResolvedLayout.of(whole).gradient_accumulation) == (16, 1)


@pytest.mark.parametrize(
    ("overrides", "micro", "passes"),
    [
        ([], 8, (8, 8)),
        (["parallelism.pp=4"], 4, (16, 16)),
        (["training.micro_batch_size=2"], 2, (32, 32)),
        (["parallelism.pp_microbatches=4"], 16, (4, 4)),
        (["parallelism.pp_microbatches=4", "training.micro_batch_size=1"], 1, (64, 4)),
        (["training.global_batch_size=6"], 1, (6, 6)),
        (["training.global_batch_size=10"], 1, (10, 10)),
        (["training.global_batch_size=7", "parallelism.pp_schedule=Interleaved1F1B"], 7, (1, 1)),
        (["training.global_batch_size=4", "parallelism.pp_schedule=DualPipeV"], 1, (4, 4)),
        (["parallelism.dp_shard=4", "parallelism.pp_schedule=ZBVZeroBubble"], 2, (8, 8)),
    ],
)
def test_micro_batches_of_a_pipeline(overrides: list[str], micro: int, passes: tuple[int, int]):
    """At least four for each rank, as large as that allows, where no key says it."""
    run = resolve_layout(experiment("training.global_batch_size=64", "parallelism.pp=2", *overrides), 1)
    assert ResolvedLayout.of(run).micro_batch_size == micro
    assert (ResolvedLayout.of(run).gradient_accumulation, ResolvedLayout.of(run).pipeline_microbatches) == passes


@pytest.mark.parametrize(
    ("overrides", "micro", "passes"),
    [
        ([], 4, ()),
        (["parallelism.dp_shard=4"], 1, ()),
        (["training.micro_batch_size=2"], 2, ()),
        (["parallelism.pp=2"], 1, (4, 12, 64)),
        (["parallelism.pp=2", "parallelism.pp_schedule=Interleaved1F1B"], 1, (4, 12, 64)),
        (["parallelism.pp=2", "parallelism.pp_microbatches=2"], 2, (2,)),
    ],
)
def test_micro_batches_of_a_batch_ramp(overrides: list[str], micro: int, passes: tuple[int, ...]):
    """Of one size, which divides every batch; a step of a pipeline is one pass."""
    ramp = ["training.global_batch_size=64", "training.batch_ramp=[[10,4],[5,12]]", "training.steps=30"]
    layout = ResolvedLayout.of(resolve_layout(experiment(*ramp, *overrides), 1))
    steps = (1, 10, 11, 15, 16, 30)
    sizes = [layout.gradient_accumulation_at(step) * layout.micro_batch_size * layout.dp_degree for step in steps]
    assert sizes == [4, 4, 12, 12, 64, 64]
    assert layout.micro_batch_size == micro
    assert not passes or layout.pass_sizes == passes


@pytest.mark.parametrize("ramp", [(), ((2, 3),), ((1, 2), (3, 4), (2, 5))])
def test_sequences_of_a_batch_ramp(ramp: tuple[tuple[int, int], ...]):
    total = 0
    for step in range(1, 12):
        total += batch_size_at(ramp, 7, step)
        assert sequences_after(ramp, 7, step) == total
        assert steps_for(ramp, 7, total) == step
        assert steps_for(ramp, 7, total + 1) == step + 1
    assert steps_for(ramp, 7, 0) == sequences_after(ramp, 7, 0) == 0


@pytest.mark.parametrize(
    ("overrides", "counts"),
    [
        ([], [5, 5]),
        (["parallelism.pp=3"], [3, 4, 3]),
        (["parallelism.pp=4"], [2, 3, 3, 2]),
        (["parallelism.pp_schedule=ZBVZeroBubble"], [2, 3, 3, 2]),
        (["parallelism.pp_last_stage_less=2"], [6, 4]),
        (["parallelism.pp_first_stage_less=1", "parallelism.pp_last_stage_less=1", "parallelism.pp=4"], [2, 3, 3, 2]),
        (["parallelism.pp_layers=[7,3]"], [7, 3]),
        (["parallelism.pp_layers_per_stage=2", "parallelism.pp=5"], [2, 2, 2, 2, 2]),
        (
            [
                "parallelism.pp_layers_per_stage=2",
                "parallelism.pp_schedule=LoopedBFS",
                "parallelism.pp_first_stage_less=1",
            ],
            [1, 2, 2, 2, 2, 1],
        ),
    ],
)
def test_layers_of_stages(overrides: list[str], counts: list[int]):
    layout = laid_out("model.layers=10", "parallelism.pp=2", *overrides)
    assert layout.layer_counts == counts
    assert [layer for layers in layout.stage_layers for layer in layers] == list(range(10))


def test_where_stages_are():
    looped = laid_out("model.layers=6", "parallelism.pp=3", "parallelism.pp_schedule=Interleaved1F1B")
    assert looped.stage_placement == [0, 1, 2, 0, 1, 2]
    v_shaped = laid_out("model.layers=6", "parallelism.pp=3", "parallelism.pp_schedule=DualPipeV")
    assert v_shaped.stage_placement == [0, 1, 2, 2, 1, 0]


def test_when_parameters_are_freed():
    assert laid_out().reshard_policy == "all_but_last"
    assert laid_out("parallelism.pp=2").reshard_policy == "never"
    assert laid_out("parallelism.pp=2", "parallelism.reshard_after_forward=always").reshard_policy == "always"


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("0,2", 2),
        ("0,9", 1),
        ("0,-1,1", 1),
        ("GPU-8f1,GPU-9a2", 2),
        (" 1 , 2 ", 2),
    ],
)
def test_visible_gpus(mask: str | None, visible: int, monkeypatch: pytest.MonkeyPatch):
    give_gpus(monkeypatch, 4)
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert machine.visible_gpus() == visible


def test_no_mask_makes_a_gpu(monkeypatch: pytest.MonkeyPatch):
    give_gpus(monkeypatch, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f1")
    assert machine.visible_gpus() == 0


def test_gpus_are_counted_by_their_device_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.visible_gpus() == 3


def test_gpus_are_counted_by_the_drivers_folder_where_there_are_no_device_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.visible_gpus() == 0
    (tmp_path / "gpus" / "0000:18:00.0").mkdir(parents=True)
    (tmp_path / "gpus" / "0000:2a:00.0").mkdir()
    assert machine.visible_gpus() == 2


@pytest.mark.parametrize(
    ("overrides", "chunk"),
    [
        ([], None),
        (["cluster.device=cuda"], 16384),
        (["cluster.device=cuda", "parallelism.tp=2", "model.heads=8"], 16384),
        (["cluster.device=cuda", "parallelism.tp=2", "parallelism.loss_parallel=false"], None),
        (["cluster.device=cuda", "training.mixed_precision=bf16", "training.fp32_modules=[h*d]"], None),
        (["cluster.device=cuda", "training.loss_chunk_tokens=null"], None),
        (["cluster.device=cuda", "training.loss_chunk_tokens=7"], 7),
        (["training.loss_chunk_tokens=7"], 7),
    ],
)
def test_automatic_chunks_of_the_loss(overrides: list[str], chunk: int | None, monkeypatch: pytest.MonkeyPatch):
    give_gpus(monkeypatch, 0)
    assert laid_out(*overrides).loss_chunk_tokens == chunk


FP32_IN_BLOCKS = ["training.mixed_precision=bf16", "training.fp32_modules=[blocks.*.attention_norm]"]
OWN = "model.architecture=titan_exp.models.llama"


@pytest.mark.parametrize(
    ("overrides", "compiled", "said"),
    [
        (["cluster.device=cpu"], False, None),
        ([], True, "compiles blocks, since this run is on a GPU"),
        (["cluster=slurm"], True, "compiles blocks, since this run is on a GPU"),
        (["compile.components=[blocks,loss]"], True, "compiles blocks and loss, since"),
        (["training.mixed_precision=bf16", "training.fp32_modules=[blocks.0,embedding]"], True, "compiles blocks"),
        (FP32_IN_BLOCKS, False, "runs eagerly: training.fp32_modules=[blocks.*.attention_norm] names modules inside"),
        ([*FP32_IN_BLOCKS, "compile.components=[loss]"], True, "compiles loss"),
        (["compile.components=[]"], False, "runs eagerly: compile.components names no part"),
        ([OWN], False, f"runs eagerly: {OWN} has code of its own (compile=blocks tries it)"),
        (["compile=none"], False, None),
        (["compile=blocks"], True, None),
    ],
)
def test_blocks_are_compiled_on_a_gpu_where_no_rule_refuses_it(
    overrides: list[str], compiled: bool, said: str | None, monkeypatch: pytest.MonkeyPatch
):
    give_gpus(monkeypatch, 1)
    composed = experiment(*overrides)
    run = resolve_layout(composed, 1)
    assert run.compile.enabled is compiled
    sentences = list(compilation(composed))
    assert len(sentences) == (said is not None)
    assert all(sentence.startswith(f"compile=auto {said}") for sentence in sentences)
    assert not violations(composed)
    # A run in which `auto` chose differs from no default.
    assert with_automatic_kernels(run).compile.enabled == (False if overrides == ["compile=none"] else "auto")
