"""Expert tensor parallelism under a recipe: ranks with parts of an expert's channels round as one rank does."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.patching import patch
from tests.quantization.test_grouped import CPU, RAGGED, RECIPES, config_of, operands, passes
from tests.ranks import run_ranks
from titan_exp.parallel.mesh import all_reduce
from titan_exp.quantization.grouped import EmulatedGroupedLinear, grouped_linear_impl_for
from titan_exp.trainer.distributed import joined_process_group

RANKS = 2


def scales_are_of_a_rank_s_channels() -> None:
    patch(f"{EmulatedGroupedLinear.__module__}.EmulatedGroupedLinear.shard", lambda _: lambda self, **_: None)


def on_part_of_the_channels(mutate: Callable[[], None] | None) -> dict[str, bool]:
    """True for every recipe and kind of sharding that gives this rank its part of what one rank computes."""
    if mutate is not None:
        mutate()
    ends = torch.tensor(RAGGED, dtype=torch.int32)
    x, weight, gradient = operands(torch.float32)
    x, weight, gradient = x[:, :64], weight[:, :128, :64], gradient[:, :128]
    with joined_process_group(CPU):
        rank, world = dist.get_rank(), dist.group.WORLD
        assert world is not None
        amax_reduce = partial(all_reduce, operation="max", group=world.group_name)

        def mine(tensor: Tensor, dim: int) -> Tensor:
            return tensor.chunk(RANKS, dim)[rank].contiguous()

        def summed(part: Tensor) -> Tensor:
            return all_reduce(part, "sum", world.group_name)

        found = {}
        for name in RECIPES:
            whole = passes(grouped_linear_impl_for(config_of(*RECIPES[name]), emulated=True), x, weight, gradient, ends)
            for kind in ("inputs", "outputs"):
                product = grouped_linear_impl_for(config_of(*RECIPES[name]), emulated=True)
                product.shard(input_sharded=kind == "inputs", amax_reduce=amax_reduce)
                if kind == "inputs":
                    output, x_grad, weight_grad = passes(product, mine(x, 1), mine(weight, 2), gradient, ends)
                    exact = torch.equal(x_grad, mine(whole[1], 1)) and torch.equal(weight_grad, mine(whole[2], 2))
                    partial_sum, expected = summed(output), whole[0]
                else:
                    output, x_grad, weight_grad = passes(product, x, mine(weight, 1), mine(gradient, 1), ends)
                    exact = torch.equal(output, mine(whole[0], 1)) and torch.equal(weight_grad, mine(whole[2], 1))
                    partial_sum, expected = summed(x_grad), whole[1]
                # A sum of two parts is that of the whole to fp32 rounding of its largest terms.
                close = torch.allclose(partial_sum, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
                found[f"{name}, {kind}"] = exact and close
        return found


@pytest.mark.parametrize("mutate", [None, scales_are_of_a_rank_s_channels])
def test_parts_of_the_channels_are_rounded_as_the_whole(mutate: Callable[[], None] | None):
    for found in run_ranks(RANKS, on_part_of_the_channels, mutate):
        same = {name for name, is_same in found.items() if is_same}
        # Blocks of MX lie within a part; of float8 rows with power-of-two scales only the smallest numbers differ.
        never = {name for name in found if not name.startswith("mx")}
        assert same == set(found) if mutate is None else len(same - never) == 2 and len(never - same) >= 8, found
