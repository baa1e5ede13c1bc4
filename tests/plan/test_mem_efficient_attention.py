"""Memory-efficient attention on CUDA: saved tensors and workspace."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.plan.layouts import allocated_by
from titan_exp.config.devices import offered_devices
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.models.spec.lookup import model_spec
from titan_exp.plan import fake_kernels
from titan_exp.plan.devices import device_named
from titan_exp.plan.fake_kernels import BACKWARD, FORWARD, Kernel, largest_workspace, workspace_bytes
from titan_exp.plan.predict import Plan, predict
from titan_exp.plan.prediction import attention_kernel
from titan_exp.plan.tables import plan_to_json, print_plan
from titan_exp.plan.trace.op_costs import decomposed_workspace
from titan_exp.rules import check

SEQ, ROWS = 128, 2
SMALL = [
    "model=llama_debug",
    "cluster=slurm_h100",
    "compile=none",
    f"training.seq_len={SEQ}",
    f"training.global_batch_size={ROWS}",
    "parallelism.dp_shard=1",
    # Whole logits, so that the peak is where all activations are kept.
    "training.loss_chunk_tokens=null",
    # The events are those of a step.
    "evaluation.every=0",
]


def experiment_of(*words: str) -> Experiment:
    experiment = to_experiment(compose([*SMALL, *words]))
    return resolve_layout(check(experiment), offered_devices(experiment.cluster))


def planned(*words: str) -> Plan:
    return predict(experiment_of(*words), device_named("h100"))


@pytest.mark.parametrize(
    ("kernel", "shape", "keys", "half", "expected"),
    [
        # Four tiles of 64 queries, each 64 x 64 numbers and 16 bytes; fp32 needs nothing for keys and values.
        (Kernel(64, 64, 64), (2, 4, 256, 64), 256, False, 2 * 4 * 4 * (64 * 64 * 4 + 16)),
        # 100 queries are two tiles, 80 numbers of a head two columns.
        (Kernel(65536, 64, 64), (1, 1, 100, 80), 100, False, 2 * 2 * (64 * 64 * 4 + 16)),
        # Gradients of keys and values stay in registers where a head is no wider than a tile has rows.
        (Kernel(128, 128, 128), (1, 32, 8192, 128), 8192, True, 32 * 64 * (128 * 128 * 4 + 16)),
        # Elsewhere they are written down for each of 200 // 32 splits.
        (
            Kernel(128, 64, 64),
            (1, 32, 8192, 128),
            8192,
            True,
            32 * (128 * 2 * (64 * 64 * 4 + 16) + 2 * 6 * 64 * 128 * 4),
        ),
        # More heads than 200 leave one split.
        (
            Kernel(128, 64, 64),
            (8, 32, 1024, 128),
            1024,
            True,
            256 * (16 * 2 * (64 * 64 * 4 + 16) + 2 * 64 * 128 * 4),
        ),
    ],
)
def test_workspace_by_hand(kernel: Kernel, shape: tuple[int, int, int, int], keys: int, half: bool, expected: int):
    assert kernel.workspace(shape, keys, half=half) == expected
    if kernel.widest >= 128 or not half:
        assert largest_workspace(shape, keys, half=half) >= expected


@pytest.mark.parametrize("width", [64, 96, 128, 192])
@pytest.mark.parametrize("half", [True, False])
def test_the_bound_is_close(width: int, half: bool):
    """For long sequences it is nearly the padded fp32 gradient of the queries."""
    shape = (1, 32, 8192, width)
    columns = -(-width // 64) * 64
    gradient = 32 * 8192 * columns * 4
    assert gradient <= largest_workspace(shape, 8192, half=half) <= 1.13 * gradient


def test_deterministic_flash_attention_adds_up_copies_of_the_query_gradient():
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    two, five = (torch.empty(batch, 32, 256, 128, device="meta") for batch in (2, 5))
    usual = [fake_kernels.workspaces(call, (heads, heads, heads)) for heads in (two, five)]
    with fake_kernels.deterministic_attention(132):
        found = [fake_kernels.workspaces(call, (heads, heads, heads)) for heads in (two, five)]
    # 132 multiprocessors for 64 heads, three copies; for 160 heads, one.
    (sums, dq, *shared), one = usual
    assert found == [[sums, 3 * dq, *shared], one]
    assert dq == 2 * 32 * 256 * 128 * 4


def test_workspace_of_a_call():
    with FakeTensorMode():
        query, key, value = (torch.empty(2, 256, 4, 64).transpose(1, 2) for _ in range(3))
        out, lse, seed, offset = FORWARD(query, key, value, None, True, 0.0, True)
        assert lse.shape == (2, 4, 256)
        arguments = (query, key, value, None, out, lse, seed, offset, 0.0, [True, True, True, False], True)
        sums, product = 4 * 2 * 4 * 256, 4 * query.numel()
        workspace = largest_workspace((2, 4, 256, 64), 256, half=False)
        assert workspace < product + sums or workspace % 512 == 0
        assert workspace_bytes(BACKWARD, (out, *arguments)) == sums + max(product + sums, -(-workspace // 512) * 512)
        scattered = torch.empty(2, 4, 256, 64)
        assert (
            workspace_bytes(BACKWARD, (scattered, *arguments)) == workspace_bytes(BACKWARD, (out, *arguments)) + product
        )
        assert workspace_bytes(FORWARD, (query, key, value)) == 0
        # Heads too wide for registers are accumulated in memory.
        wide = torch.empty(2, 256, 4, 192, dtype=torch.bfloat16).transpose(1, 2)
        assert workspace_bytes(FORWARD, (wide, wide, wide)) == 4 * wide.numel()


def test_document_mask_is_kept_as_a_bias():
    """The mask becomes an additive bias in every layer, allocated until the layer's backward pass."""
    experiment = experiment_of("data.document_mask=true", "training.mixed_precision=bf16")
    spec = model_spec(experiment.model)
    assert spec is not None
    attention = spec.attention
    assert attention is not None
    layers, heads, kv_heads = len(spec.layers), attention.heads, attention.kv_heads
    with_mask, without = (
        predict(experiment_of(f"data.document_mask={on}", "training.mixed_precision=bf16"), device_named("h100"))
        for on in ("true", "false")
    )
    births = [Counter(size for _, size, _ in plan.ranks[0].trace.step_events if size) for plan in (with_mask, without)]
    bias = ROWS * SEQ * SEQ * 2
    assert births[0][bias] - births[1][bias] == layers
    assert with_mask.at_most
    assert not without.at_most
    assert plan_to_json(with_mask)["at_most"] is True
    # Keys and values are repeated for all heads of their group, and kept. Their own are not, then. Dropout adds
    # two unused numbers.
    head = ROWS * SEQ * attention.qk_dim * 2
    own = 2 * kv_heads * head
    kept, before = (plan.ranks[0].trace.peak.by_category["activations"] for plan in (with_mask, without))
    assert kept - before == layers * (bias + 2 * heads * head - own + 2 * 512)


def test_unaligned_mask_rows_are_padded():
    plan = planned("data.document_mask=true", "training.mixed_precision=bf16", "training.seq_len=100")
    assert plan.ranks[0].trace.peak.bytes > 0
    sizes = Counter(size for _, size, _ in plan.ranks[0].trace.step_events)
    filled = -(-ROWS * 100 * 104 * 2 // 512) * 512
    assert sizes[filled] == plan.experiment.model.layers


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("", marks=pytest.mark.night),
        "parallelism.cp=2",
        pytest.param("parallelism.cp=2 parallelism.cp_method=ulysses", marks=pytest.mark.night),
    ],
)
def test_fp32_is_planned(options: str):
    plan = planned("training.mixed_precision=fp32", *options.split())
    (rank,) = plan.ranks
    assert attention_kernel(plan.experiment) == "efficient"
    assert plan.at_most
    # Nothing is known of how fast fp32 is.
    assert rank.time is None
    plain = planned("training.mixed_precision=fp32", "model.attention_backend=math", "parallelism.cp=1")
    assert not plain.at_most
    if "cp" not in options:
        # Plain operators know of no triangle, and take the whole square.
        assert rank.trace.costs.flops < plain.ranks[0].trace.costs.flops


def test_kernel_choice_equals_cudas():
    assert attention_kernel(experiment_of("training.mixed_precision=bf16")) == "flash"
    assert attention_kernel(experiment_of("training.mixed_precision=fp32")) == "efficient"
    assert attention_kernel(experiment_of("training.mixed_precision=bf16", "model.attention_backend=math")) == "math"
    words = ("training.mixed_precision=bf16", "data.document_mask=true", "model.head_dim=36")
    assert attention_kernel(experiment_of(*words)) == "math"


@pytest.mark.parametrize(("backend", "own", "other"), [("flash", "flash", "cudnn"), ("auto", "cudnn", "flash")])
def test_a_list_of_saved_operators_names_the_attention_of_the_run(backend: str, own: str, other: str):
    def flops(*saved: str) -> int:
        run = "training.mixed_precision=bf16", f"model.attention_backend={backend}", "activation_checkpoint=selective"
        return planned(*run, *saved).ranks[0].trace.costs.flops

    def of_list(kernel: str) -> int:
        return flops(f"activation_checkpoint.save=[aten._scaled_dot_product_{kernel}_attention]")

    # An automatic list without a budget saves attention alone; what is not saved is computed again.
    assert of_list(own) == flops("activation_checkpoint.budget=0")
    assert of_list(own) < of_list(other) == flops("activation_checkpoint=full")


def test_other_devices_are_refused():
    with pytest.raises(UserError, match="MI300X"):
        predict(experiment_of("training.mixed_precision=fp32"), device_named("mi300x"))


def test_upper_bound_is_stated(capsys: pytest.CaptureFixture[str]):
    print_plan(planned("training.mixed_precision=fp32"))
    assert "This is an upper bound" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11
def test_softmax_temporaries_equal_torchs(tmp_path: Path):
    """Temporaries inside plain attention's softmax, which a trace sees as one operator."""
    scores = torch.randn(2, 4, 256, 256)
    operator = torch.ops.aten._safe_softmax.default
    largest = allocated_by(lambda: operator(scores, -1), tmp_path)
    inside = decomposed_workspace(operator, (scores, -1))
    assert largest == inside + scores.numel() * 4
    assert inside > scores.numel()
    assert decomposed_workspace(torch.ops.aten.softmax.int, (scores, -1)) == 0
