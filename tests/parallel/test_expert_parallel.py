"""Expert parallelism: groups of ranks, placement of weights, order of exchanged rows, ranks without tokens."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.config.composing import experiment
from tests.parallel.test_expert_recompute import LAYERS, parallel_model
from tests.ranks import run_ranks
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.build import build_model
from titan_exp.parallel.apply import parallelize
from titan_exp.parallel.expert_parallel import RowOrder, TokenExchange, TokenGroup
from titan_exp.parallel.mesh import build_mesh
from titan_exp.trainer.distributed import joined_process_group

CPU = torch.device("cpu")


def groups(*layout: str) -> dict[str, list[int]]:
    """Ranks of this rank's group along each axis of the experts."""
    with joined_process_group(CPU):
        mesh = build_mesh(experiment(*layout).parallelism, CPU, experts=True)
        assert mesh.experts is not None
        dist.barrier()  # none leaves before all have joined
        return {axis: dist.get_process_group_ranks(mesh.experts.get_group(axis)) for axis in ("efsdp", "ep", "etp")}


def test_experts_take_ranks_of_tp_then_of_dp_shard():
    first = run_ranks(4, groups, "parallelism.dp_shard=2", "parallelism.tp=2", "parallelism.ep=2")[0]
    assert first == {"efsdp": [0, 2], "ep": [0, 1], "etp": [0]}
    first = run_ranks(4, groups, "parallelism.dp_shard=2", "parallelism.tp=2", "parallelism.ep=2", "parallelism.etp=2")[
        0
    ]
    assert first == {"efsdp": [0], "ep": [0, 2], "etp": [0, 1]}
    last = run_ranks(4, groups, "parallelism.dp_replicate=2", "parallelism.dp_shard=2", "parallelism.ep=2")[3]
    assert last == {"efsdp": [3], "ep": [2, 3], "etp": [3]}


def placements(*layout: str) -> dict[str, object]:
    """Sharded dim by axis, and local shape, of the experts' weights."""
    made = experiment("model=qwen3_moe_debug", "parallelism.dp_shard=1", "compile=none", *layout)
    with joined_process_group(CPU):
        with torch.device("meta"):
            model = build_model(made.model, seq_len=16, attention_backend="math")
        mesh = build_mesh(made.parallelism, CPU, experts=True)
        parallelize(model, mesh, ResolvedLayout.of(made), made.activation_checkpoint, made.compile)
        found = {}
        for name, weight in model.named_parameters():
            if "experts" in name:
                assert isinstance(weight, DTensor)
                dims = zip(weight.device_mesh.mesh_dim_names or (), weight.placements, strict=True)
                found[name.split(".")[-2]] = (
                    {axis: None if place.is_replicate() else getattr(place, "dim", None) for axis, place in dims},
                    tuple(weight.to_local().shape),
                )
        dist.barrier()  # none leaves before all have joined
        return found


@pytest.mark.parametrize(
    ("layout", "gate_up", "down"),
    [
        # 8 experts of 64 channels, width 64: gate_up [8, 128, 64], down [8, 64, 64].
        pytest.param("dp_shard=4", ({"fsdp": 0}, (2, 128, 64)), ({"fsdp": 0}, (2, 64, 64)), marks=pytest.mark.night),
        ("dp_shard=4 ep=2", ({"efsdp": 0, "ep": 0}, (2, 128, 64)), ({"efsdp": 0, "ep": 0}, (2, 64, 64))),
        pytest.param(
            "dp_shard=4 ep=4",
            ({"efsdp": 0, "ep": 0}, (2, 128, 64)),
            ({"efsdp": 0, "ep": 0}, (2, 64, 64)),
            marks=pytest.mark.night,
        ),
        pytest.param(
            "tp=2 dp_shard=2", ({"efsdp": 0}, (2, 128, 64)), ({"efsdp": 0}, (2, 64, 64)), marks=pytest.mark.night
        ),
        ("tp=2 ep=2", ({"ep": 0}, (4, 128, 64)), ({"ep": 0}, (4, 64, 64))),
        ("tp=2 dp_shard=2 etp=2", ({"efsdp": 0, "etp": 1}, (4, 64, 64)), ({"efsdp": 0, "etp": 2}, (4, 64, 32))),
        # Two experts of a rank are not divided evenly among four: channels are.
        (
            "dp_shard=4 ep=2 experts=2 active_experts=1",
            ({"efsdp": 1, "ep": 0}, (1, 64, 64)),
            ({"efsdp": 1, "ep": 0}, (1, 32, 64)),
        ),
        pytest.param(
            "dp_shard=3 experts=4 active_experts=1",
            ({"fsdp": 0}, (2, 128, 64)),
            ({"fsdp": 0}, (2, 64, 64)),
            marks=pytest.mark.night,
        ),
    ],
)
def test_experts_are_sharded_by_experts_first(layout: str, gate_up: object, down: object):
    keys = [f"{'model.moe' if 'experts' in word else 'parallelism'}.{word}" for word in layout.split()]
    made = experiment("model=qwen3_moe_debug", "parallelism.dp_shard=1", *keys)
    world = ResolvedLayout.of(made).world_size
    found = run_ranks(world, placements, *keys)[0]
    assert found == {"gate_up": gate_up, "down": down}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_are_sorted_by_expert_then_rank_then_token(ranks: int):
    counts = torch.randint(0, 4, (ranks, 5), generator=torch.Generator().manual_seed(ranks))
    counts[0, 2] = counts[-1, 4] = 0
    labels = [
        (expert, rank, token)
        for rank in range(ranks)
        for expert in range(5)
        for token in range(int(counts[rank, expert]))
    ]
    order = RowOrder.by_expert(counts, len(labels))
    rows = torch.tensor(labels).reshape(-1, 3).float().requires_grad_()
    found = order.apply(rows)
    assert [tuple(int(value) for value in row) for row in found] == sorted(labels)
    assert torch.equal(order.undo(found), rows)
    (gradient,) = torch.autograd.grad(found, rows, found.detach() * 2)
    assert torch.equal(gradient, rows * 2)


def exchanged(counts: list[list[int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows that this rank received, their ends, what came back, and the gradient of the rows."""
    with joined_process_group(CPU):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        assert dist.group.WORLD is not None
        own = torch.tensor(counts[rank])
        rows = (100 * rank + torch.arange(int(own.sum()))).float()[:, None].requires_grad_()
        exchange = TokenExchange.start(own.cumsum(0, dtype=torch.int32), ranks, dist.group.WORLD.group_name)()
        weights = rows.detach()[:, 0].requires_grad_()
        received = exchange.dispatch(rows, weights)
        assert received.weights is not None
        assert torch.equal(received.rows[:, 0], received.weights)
        back = exchange.give_back(received.rows + received.weights[:, None] * rank, received, rows.shape[0])
        gradient, of_weights = torch.autograd.grad(back, (rows, weights), torch.ones_like(back))
        return received.rows.detach()[:, 0], received.ends, back.detach()[:, 0], gradient[:, 0] + of_weights


def test_rows_go_to_their_experts_and_back():
    """Expert 1 has no rows, rank 1 sends none, and all of rank 0's go to others."""
    counts = [[0, 0, 2, 1], [0, 0, 0, 0]]
    first, second = run_ranks(2, exchanged, counts)
    assert first[0].numel() == 0
    assert first[1].tolist() == [0, 0]
    assert second[0].tolist() == [0, 1, 2]
    assert second[1].tolist() == [2, 3]
    assert first[2].tolist() == [0, 2, 4]
    assert first[3].tolist() == [2, 2, 2]
    assert second[3].numel() == 0
    first, second = run_ranks(2, exchanged, [[1, 0, 2, 1], [2, 0, 0, 3]])
    assert first[0].tolist() == [0, 100, 101]
    assert first[1].tolist() == [3, 3]
    assert second[0].tolist() == [1, 2, 3, 102, 103, 104]
    assert second[1].tolist() == [2, 6]
    assert first[2].tolist() == [0, 2, 4, 6]
    assert second[2].tolist() == [100, 101, 204, 206, 208]


def split_and_joined(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of the tokens, all of them after a product with the rank, and the gradient."""
    with joined_process_group(CPU):
        assert dist.group.WORLD is not None
        ranks = TokenGroup(dist.group.WORLD.group_name, dist.get_world_size(), dist.get_rank())
        x = torch.arange(2 * length).float().view(2, length, 1).requires_grad_()
        part = ranks.split(x)
        joined = ranks.join(part * (ranks.rank + 1), length)
        (gradient,) = torch.autograd.grad(joined, x, torch.ones_like(joined))
        return part.detach()[..., 0], joined.detach()[..., 0], gradient[..., 0]


@pytest.mark.parametrize("length", [6, 5, 1])
def test_each_rank_takes_a_part_of_the_tokens(length: int):
    factor = torch.arange(length) // -(-length // 3) + 1.0
    results = run_ranks(3, split_and_joined, length)
    assert torch.equal(torch.cat([part for part, _, _ in results], 1), torch.arange(2.0 * length).view(2, length))
    for _, joined, gradient in results:
        assert torch.equal(joined, torch.arange(2.0 * length).view(2, length) * factor)
        assert torch.equal(gradient, factor.expand(2, -1))


class Operators(TorchDispatchMode):
    """Names of the operators that run, also in compiled code."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.names.append(str(getattr(func, "overloadpacket", func)).removeprefix("titan_exp."))
        return func(*args, **(kwargs or {}))


def forward_operators(*layout: str) -> list[str]:
    """Operators of a forward pass, after one that compiles."""
    with joined_process_group(CPU):
        model = parallel_model("model.moe.shared_experts=1", *layout)
        tokens = torch.arange(64).view(2, 32)
        model(tokens)
        with Operators() as operators:
            model(tokens)
        return operators.names


@pytest.mark.parametrize(
    "layout", ["compile=none", pytest.param("compile=blocks compile.backend=aot_eager", marks=pytest.mark.night)]
)
def test_shared_experts_run_while_counts_are_exchanged(layout: str):
    """Both of their projections do, and the host waits before the rows are sent."""
    for names in run_ranks(2, forward_operators, *layout.split(), limit=300):
        seen = [name for name in names if name in ("aten.mm", "all_to_all_rows") or "count_exchange" in name]
        starts = [index for index, name in enumerate(seen) if name == "start_count_exchange"]
        assert len(starts) == LAYERS
        between = ["start_count_exchange", "aten.mm", "aten.mm", "finish_count_exchange", "all_to_all_rows"]
        assert all(seen[start : start + len(between)] == between for start in starts)


def saved_rows() -> list[int]:
    """Rows of the routed tensors that backward keeps, of all layers."""
    kept: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        if saved.ndim == 2 and saved.shape[1] == 64:
            kept[saved.untyped_storage()._cdata] = saved.shape[0]
        return saved

    with joined_process_group(CPU):
        model = parallel_model("model.moe.ffn_dim=96")
        others = {size for weight in model.parameters() for size in weight.shape}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            out = model((torch.arange(64).view(2, 32) * 7 + 31 * dist.get_rank()) % 320)
        assert out.requires_grad
        return [rows for rows in kept.values() if rows not in others]


def test_backward_keeps_the_rows_for_experts_and_none_that_come_back():
    """Each rank sends three rows for each of its 64 tokens; what both receive is as many."""
    first, second = run_ranks(2, saved_rows)
    assert len(first) == len(second) == LAYERS
    assert [mine + others for mine, others in zip(first, second, strict=True)] == [2 * 3 * 64] * LAYERS
