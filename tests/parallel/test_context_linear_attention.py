"""Linear attention over a sharded sequence against one rank in fp64: contiguous, zigzag and nested shards."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.config.composing import experiment
from tests.ranks import run_ranks
from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.ops.linear_attention import GatedDeltaCore, ShortConvolutionCore, l2_normalized
from titan_exp.parallel.context_parallel.apply import gather_sequence, segments_of, shard_linear_attention
from titan_exp.parallel.context_parallel.load_balance import SequenceShard, ShardedSequence
from titan_exp.parallel.mesh import Mesh, build_mesh
from titan_exp.trainer.distributed import joined_process_group

CPU = torch.device("cpu")
BATCH, SEQ, DIM, TAPS = 2, 48, 10, 4
KEY_HEADS, HEADS, WIDTH = 2, 4, 5
KEYS, VALUES = KEY_HEADS * WIDTH, HEADS * WIDTH
DOCUMENTS = ([0, 1, 13, 14, 33, SEQ], [0, 24, 30, SEQ])
"""Starts of each row's documents, and its end: across the ends of segments, at them, and one of a single token."""

Layout = tuple[ParallelismConfig, tuple[int, ...], str]
"""Degrees, places at which the sequence is cut, and how a block runs: plainly, compiled, checkpointed."""
REFUSED = "segments are as long as the filter reaches"
"""Layouts with others are refused."""


class Mixer(nn.Module):
    """Projection, convolution, gates, gated delta rule and output projection, in fp64."""

    qkv: Tensor
    filters: Tensor
    decay: Tensor
    beta: Tensor
    out: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        decays = HEADS * (WIDTH if kind == "channel" else 1)
        shapes = {"qkv": (2 * KEYS + VALUES, DIM), "filters": (2 * KEYS + VALUES, TAPS), "out": (DIM, VALUES)}
        for name, shape in (shapes | {"decay": (decays, DIM), "beta": (HEADS, DIM)}).items():
            self.register_parameter(name, nn.Parameter(0.5 * torch.randn(shape, generator=random, dtype=torch.float64)))
        self.convolution_core, self.core = ShortConvolutionCore(), GatedDeltaCore(chunk=8)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        mixed = self.convolution_core(F.linear(x, self.qkv), self.filters, documents)
        q, k, v = (part.unflatten(-1, (-1, WIDTH)) for part in mixed.split((KEYS, KEYS, VALUES), dim=-1))
        # A strong decay would hide what other ranks send.
        g = -0.1 * F.softplus(F.linear(x, self.decay))
        g = g.unflatten(-1, (HEADS, -1)) if self.decay.shape[0] > HEADS else g
        beta = 2 * F.linear(x, self.beta).sigmoid()
        return F.linear(self.core(l2_normalized(q), l2_normalized(k), v, g, beta, documents).flatten(2), self.out)


def whole_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, gradient of the outputs, and documents."""
    random = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn(BATCH, SEQ, DIM, generator=random, dtype=torch.float64) for _ in range(2))
    places = torch.arange(SEQ)
    rows = [cast("Tensor", sum((places >= cut).long() for cut in cuts[1:-1])) for cuts in DOCUMENTS]
    return x, gradient, torch.stack(rows)


def passes(call: Callable[..., Tensor], mixer: nn.Module, x: Tensor, documents: Any, gradient: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    out = call(x, documents)
    return [out.detach(), *torch.autograd.grad(out, [x, *mixer.parameters()], gradient)]


def errors(layouts: list[Layout], kinds: list[str], mutate: Callable[[], None] | None = None) -> list[Any]:
    """Largest error of outputs and gradients over kinds, with and without documents, or a refusal, by layout."""
    if mutate is not None:
        mutate()
    with joined_process_group(CPU):
        found = []
        for layout, cuts, how in layouts:
            mesh = build_mesh(layout, CPU, cuts=cuts)
            cases = [(kind, packed) for kind in kinds for packed in (True, False)]
            try:
                found.append(max(_error(mesh, *case, how) for case in (cases[:1] if "compile" in how else cases)))
            except AssertionError as error:
                found.append(str(error))
        dist.barrier()  # none leaves before all have joined
        return found


@cache
def on_one_rank(kind: str, packed: bool) -> list[Tensor]:
    x, gradient, documents = whole_inputs()
    one = Mixer(kind)
    return passes(one, one, x, documents if packed else None, gradient)


def _error(mesh: Mesh, kind: str, packed: bool, how: str) -> float:
    x, gradient, documents = whole_inputs()
    mixer, expected = Mixer(kind), on_one_rank(kind, packed)
    shard_linear_attention(mixer, mesh)
    call: Callable[..., Tensor] = mixer
    if "checkpoint" in how:
        call = cast("Any", lambda *given: checkpoint(mixer, *given, use_reentrant=False))
    if "compile" in how:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    parts = [mesh.sequence_shard.take(tensor) for tensor in (x, gradient, documents)]
    mine = passes(call, mixer, parts[0], parts[2] if packed else None, parts[1])
    found = [gather_sequence(part, mesh) for part in mine[:2]]
    for part in mine[2:]:
        dist.all_reduce(part)
        found.append(part)
    return max(float((it - exact).abs().max() / exact.abs().max()) for it, exact in zip(found, expected, strict=True))


def layout(*keys: str) -> ParallelismConfig:
    return experiment(*(f"parallelism.{key}" for key in ("dp_shard=1", *keys))).parallelism


CONTIGUOUS, ZIGZAG = "cp_method=ulysses", "cp_method=ring"


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_sharded_sequence_is_the_whole_one(world: int):
    layouts: list[Layout] = [(layout(f"cp={world}", order), (), "plainly") for order in (CONTIGUOUS, ZIGZAG)]
    if world == 2:
        layouts += [(layout("cp=2", ZIGZAG), (16, 32), how) for how in ("plainly", "compile and checkpoint")]
        layouts.append((layout("cp=2", ZIGZAG), (8, 12), "plainly"))
    if world == 4:
        # Two groups of two ranks: each group's head and tail pieces are cut once more.
        layouts.append((layout("cp=4", ZIGZAG, "cp_ulysses=2"), (), "plainly"))
    for found in run_ranks(world, errors, layouts, ["head", "channel"]):
        if world == 2:
            assert REFUSED in found.pop()
        assert max(found) < 1e-12, found


@pytest.mark.night
@pytest.mark.parametrize("how", ["compile", "checkpoint"])
def test_compiled_and_checkpointed_too(how: str):
    layouts = [(layout("cp=2", ZIGZAG), (), how)]
    for found in run_ranks(2, errors, layouts, ["channel"]):
        assert max(found) < 1e-12, found


def test_segments_cover_the_sequence_once_and_in_order():
    for across, within, zigzag, cuts in ((3, 1, True, ()), (1, 4, True, ()), (2, 3, True, (24,)), (4, 1, False, ())):
        shards = ShardedSequence(SequenceShard(across, 0, zigzag, cuts), SequenceShard(within, 0, zigzag=False))
        covered = dict[int, Tensor]()
        for rank in range(shards.degree):
            own = replace(
                shards,
                across=replace(shards.across, rank=rank // within),
                within=replace(shards.within, rank=rank % within),
            )
            tokens = own.take(torch.arange(SEQ)[None])[0]
            segments = segments_of(own, len(tokens))
            assert len(segments.order) == len(set(segments.order))
            for index, (at, place) in enumerate(zip(segments.slices, segments.own, strict=True)):
                assert segments.order[place] == rank * segments.slots + index
                covered[place] = tokens[at]
        assert torch.equal(torch.cat([covered[place] for place in range(len(covered))]), torch.arange(SEQ))
