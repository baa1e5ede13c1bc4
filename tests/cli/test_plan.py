"""The verb `plan` on the command line, and its refusals."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from titan_exp.cli.main import main
from titan_exp.cli.plan import DOES_NOT_FIT
from titan_exp.config.command_line.options import take_options
from titan_exp.config.command_line.verb_options import PlanOptions
from titan_exp.config.devices import offered_devices
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import ResolvedLayout, resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.plan.caching_allocator import MIB
from titan_exp.plan.devices import DEVICES, device_named, overhead_of
from titan_exp.plan.predict import Plan, predict
from titan_exp.plan.tables import plan_to_json, print_plan, print_unwrapped
from titan_exp.rules import check
from titan_exp.tracking.display import GIB
from titan_exp.tracking.throughput import PEAK_TFLOPS

CLUSTER = ["cluster=slurm_h100", "compile=none", "training.seq_len=512", "training.mixed_precision=bf16"]
SMALL = ["model=llama_debug", *CLUSTER, "training.global_batch_size=64"]


def planned(*words: str, code: int = 0, stream: str | None = None) -> str:
    """Output of the verb, or its error if it fails and no stream is named."""
    command = [sys.executable, "-m", "titan_exp", "plan", *words]
    environment = {**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == code, done.stderr
    return getattr(done, stream or ("stderr" if code else "stdout"))


def test_json_adds_up():
    found = json.loads(planned(*SMALL, "parallelism.dp_shard=8", "parallelism.pp=4", "--ranks", "1,3", "--json"))
    assert found["world_size"] == 32
    assert [rank["pipeline_rank"] for rank in found["ranks"]] == [1, 3]
    for rank in found["ranks"]:
        assert rank["peak_allocated_bytes"] == sum(rank["peak_by_category"].values()) > 0
        allocator = rank["allocator"]
        assert rank["expandable_segments"]
        assert rank["peak_allocated_bytes"] <= allocator["allocated"] <= allocator["reserved"]
        assert rank["allocator_bytes"] == allocator["reserved"] - rank["peak_allocated_bytes"] > 0
        # cuBLAS has one on Hopper for each thread: forward and backward.
        assert rank["peak_by_category"]["workspaces"] == 2 * 32 * 2**20
        assert rank["peak_by_category"]["optimizer"] > rank["peak_by_category"]["parameters"] > 0
    kinds = {(message["axis"], message["kind"]) for message in found["ranks"][0]["messages"]}
    assert {("pp", "send"), ("pp", "receive"), ("fsdp", "all-gather"), ("fsdp", "reduce-scatter")} <= kinds
    # 1F1B of 4 ranks and m micro-batches waits for 3 of m + 3 turns.
    microbatches = 8
    assert found["bubble"] == pytest.approx(3 / (microbatches + 3))
    assert found["step_seconds"] > max(rank["seconds"]["matmuls"] for rank in found["ranks"])


def test_a_table_for_people():
    said = planned(*SMALL, "parallelism.dp_shard=64", "--device", "mi300x")
    assert "llama-debug on 64 x MI300X 192GB" in said
    assert said.splitlines()[0].endswith(" per step"), "no title is wrapped"
    for word in (
        "params",
        "optim",
        "activ",
        "dp_shard=fsdp",
        "reduce-scatter",
        "of the bf16 peak",
        "titan-exp help planner-accuracy",
        " reserved + 1.20 process = ",
        "GPU-hours",
        "reserved",
        "in expandable segments",
        "with cluster.expandable_segments=false",
        "CUDA's context and code and NCCL's buffers take 1.20",
    ):
        assert word in said


def verdict(plan: Plan) -> str:
    """Sentence about fitting the device."""
    console = Console(record=True, width=1000, file=io.StringIO())
    print_plan(plan, console)
    return next(line for line in console.export_text().splitlines() if " GiB of tensors" in line)


def planned_here(*words: str, room: int = 80 * GIB) -> Plan:
    """Plan for a GPU on which a run's tensors have `room` bytes."""
    fixed = [
        "parallelism.dp_shard=4",
        "training.micro_batch_size=2",
        "training.global_batch_size=16",
        "evaluation.every=0",
    ]
    experiment = to_experiment(compose([*SMALL, *fixed, *words]))
    experiment, device = resolve_layout(check(experiment), offered_devices(experiment.cluster)), device_named("h100")
    return predict(experiment, replace(device, memory=room + overhead_of(ResolvedLayout.of(experiment), None, device)))


def test_a_batch_ramp_is_planned_with_its_largest_batch():
    plain = planned_here("training.steps=100", "training.global_batch_size=24")
    ramp = planned_here("training.steps=100", "training.batch_ramp=[[10,8],[20,16]]", "training.global_batch_size=24")
    assert ramp.ranks[0].bytes == plain.ranks[0].bytes
    assert plain.tokens == 100 * plain.tokens_per_step
    assert ramp.tokens * 24 == (10 * 8 + 20 * 16 + 70 * 24) * ramp.tokens_per_step
    console = Console(record=True, width=1000, file=io.StringIO())
    print_plan(ramp, console)
    assert "training.global_batch_size=24, the largest batch of the ramp" in console.export_text()


def test_a_plan_of_some_pipeline_ranks_says_that_others_are_not_checked():
    words = [
        *SMALL,
        "parallelism.dp_shard=4",
        "parallelism.pp=2",
        "training.global_batch_size=16",
        "evaluation.every=0",
    ]
    experiment = resolve_layout(to_experiment(compose(words)), 8)
    for ranks, fits in ((None, "Fits, with "), ((1,), "The planned ranks fit, with ")):
        console = Console(record=True, width=1000, file=io.StringIO())
        print_plan(predict(experiment, device_named("h100"), ranks), console)
        said = console.export_text()
        assert f"\n{fits}" in said
        assert ("This plan has only pipeline rank 1 of 0 to 1. It says nothing about the others." in said) is (
            ranks is not None
        )


def test_no_digit_is_cut_off_where_it_is_narrow():
    table = Table("parameters", "activations", "in all")
    table.add_row("123.45", "6789.01", "6912.46")
    text = io.StringIO()
    print_unwrapped(Console(file=text, width=12), table)
    assert "123.45" in text.getvalue()
    assert "activations" in text.getvalue()
    assert "\u2026" not in text.getvalue()


WIDE = ("model.dim=512", "model.layers=8")
"""Large enough that expandable segments reserve less; of a small model, they reserve a page more."""


@pytest.mark.parametrize("segments", ["expandable", pytest.param("fixed", marks=pytest.mark.night)])
def test_what_the_allocator_reserves_under_pressure_decides(segments: str):
    words = [*WIDE, f"cluster.expandable_segments={str(segments == 'expandable').lower()}"]
    plan = planned_here(*words)
    (rank,) = plan.ranks
    assert rank.allocator is not None
    tensors, reserved = rank.trace.peak.bytes, rank.allocator.reserved
    assert (rank.bytes, rank.allocator.retries) == (reserved, 0)
    said = verdict(plan)
    assert said.startswith("Fits, ")
    assert f"in {segments} segments (" in said
    # Cached segments are given back as long as the tensors fit.
    tight = planned_here(*words, room=reserved - 1)
    (rank,) = tight.ranks
    assert rank.allocator is not None
    assert (rank.allocator.fits, rank.bytes < reserved, rank.allocator.retries > 0) == (True, True, True)
    said = f"in 3 steps it finds the device full {rank.allocator.retries} times"
    assert verdict(tight).startswith(f"Fits with the allocator under pressure: {said}")
    assert plan_to_json(tight)["ranks"][0]["allocation_retries"] == rank.allocator.retries
    small = planned_here(*words, room=tensors - MIB)
    assert small.ranks[0].bytes == reserved
    assert verdict(small).startswith("Does not fit, because the device has ")


@pytest.mark.night
def test_a_run_that_does_not_fit_ends_with_changes_that_would():
    words = ("model=llama_debug", "cluster.device=cpu", "cluster.memory_gb=2", "cluster=slurm", "training.seq_len=4096")
    words = (*words, "model.vocab_size=32768", "training.global_batch_size=4", "training.micro_batch_size=4")
    said = planned(*words, code=DOES_NOT_FIT, stream="stdout")
    assert "This run does not fit: a rank needs" in said
    assert "a node (cluster.memory_gb) has 2 GiB" in said
    assert "  Predicted to fit:\n    training.loss_chunk_tokens=2048" in said
    fits = planned("model=llama_debug", "cluster.device=cpu")
    assert fits.splitlines()[-1].startswith("Fits, ")


@pytest.mark.night
def test_a_recipe_is_planned_with_the_instructions_of_the_gpu():
    recipe = ["quantization=float8_rowwise", "quantization.smallest_gemm=0"]
    without, with_it = (plan.ranks[0].trace for plan in (planned_here(), planned_here(*recipe)))
    emulated = planned_here(*recipe, "quantization.emulate=true").ranks[0].trace
    assert with_it.costs.flops == without.costs.flops == emulated.costs.flops > 0
    # All matmuls but the head's and attention's.
    assert with_it.costs.flops > with_it.costs.fp8_flops > 0 == without.costs.fp8_flops == emulated.costs.fp8_flops
    # Emulated products read and write their operands in fp32 too.
    assert without.costs.bytes_moved < with_it.costs.bytes_moved < emulated.costs.bytes_moved


def test_what_is_not_modelled_is_refused_all_at_once():
    said = planned(
        *SMALL,
        "parallelism.dp_shard=8",
        "model.attention_backend=flex",
        "compile=blocks",
        "compile.backend=cudagraphs",
        code=2,
    )
    assert "We cannot plan this run." in said
    assert "compile.backend=cudagraphs" in said
    assert "model.attention_backend=flex" in said
    assert "Traceback" not in said


def test_a_captured_pass_is_traced_with_all_layers():
    words = ("parallelism.dp_shard=1", "training.mixed_precision=bf16", "compile.cuda_graphs=true", "model.layers=40")
    said = planned(*SMALL, *words)
    assert "and in the pool of a CUDA graph" in said
    assert "every layer traced, because a captured pass keeps the gradients of all layers" in said


def test_options_are_told_from_overrides():
    arguments = ["--ranks", "0,15", "model=llama3_8b", "--device", "h200", "--json", "--full"]
    options, rest = take_options(PlanOptions, arguments)
    assert (options.pipeline_ranks, options.device, options.json, rest) == ((0, 15), "h200", True, ["model=llama3_8b"])
    assert options.full
    with pytest.raises(UserError, match="ranks=first: must be numbers separated by commas, as in 0,15"):
        take_options(PlanOptions, ["--ranks", "first"])
    with pytest.raises(UserError, match="--device needs a value"):
        take_options(PlanOptions, ["--device"])


def test_a_verb_misspelt_is_no_override(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "serch", "model=llama3_8b"]) == 2
    assert "did you mean titan-exp plan search?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["gpus=64"], ["--gpus", "64"], ["--num-gpus=64"]])
def test_a_number_of_gpus_is_refused_with_what_takes_it(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *words, "model=llama3_70b"]) == 2
    said = capsys.readouterr().err
    nodes, search = ("cluster=slurm_h100 cluster.nodes=8", "titan-exp plan search --gpus 64 cluster=slurm_h100")
    assert nodes in said
    assert search in said
    assert offered_devices(to_experiment(compose(nodes.split())).cluster) == 64


def test_an_unknown_device_is_refused_with_the_other_mistakes(capsys: pytest.CaptureFixture[str]):
    words = ["plan", *SMALL, "parallelism.dp_shard=8", "training.global_batch_size=12", "--device"]
    assert main([*words, "h1000"]) == 2
    said = capsys.readouterr().err
    assert "--device=h1000: unknown device\n    did you mean h100?" in said
    assert "training.global_batch_size=12: " in said


def test_a_plan_without_a_time_says_why():
    fp32 = ("training.mixed_precision=fp32", "model.attention_backend=math")
    slow = planned_here(*fp32)
    for plan, why in (
        (planned_here(), ""),
        (slow, "no speed model for fp32 on GPUs. Use training.mixed_precision=bf16"),
    ):
        console = Console(record=True, width=1000, file=io.StringIO())
        print_plan(plan, console)
        assert why in plan.why_no_time
        assert (f"no time: {plan.why_no_time}." in console.export_text()) is bool(why)
    machine = resolve_layout(to_experiment(compose(["model=llama_debug", "cluster.device=cpu"])), 1)
    remote = replace(machine, cluster=replace(machine.cluster, kind="slurm"))
    reasons = [replace(slow, experiment=run).why_no_time for run in (machine, remote)]
    assert ["titan-exp doctor" in reasons[0], "CPUs of a cluster" in reasons[1]] == [True, True]


def test_calibration_is_refused_with_the_verb_that_measures(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "calibrate", "study"]) == 2
    assert "Run titan-exp doctor" in capsys.readouterr().err


def test_devices_are_those_that_mfu_is_counted_by():
    with pytest.raises(UserError, match="did you mean h100"):
        device_named("h10")
    peaks = {peak for _, peak in PEAK_TFLOPS}
    assert {device.bf16_tflops for device in DEVICES.values()} <= peaks
