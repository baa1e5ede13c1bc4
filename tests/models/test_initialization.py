import hashlib
from unittest.mock import patch

import numpy as np
import pytest
import torch

from titan_exp.models.blocks import linear
from titan_exp.models.blocks.linear import InitSpec, ShardSpec, init_shard_

NORMAL = InitSpec("normal", 0.5)


def shard(part: ShardSpec, name: str = "w", seed: int = 0, init: InitSpec = NORMAL) -> torch.Tensor:
    values = torch.full(part.size, torch.nan)
    init_shard_(values, seed, name, init, part)
    return values


def whole(shape: tuple[int, ...], name: str = "w", seed: int = 0) -> torch.Tensor:
    return shard(ShardSpec.whole(shape), name, seed)


@pytest.mark.parametrize("shape", [(200, 30), (64, 7), (1, 5), (37,), (3, 130, 6), (2, 3, 4, 5)])
@pytest.mark.parametrize("chunk", [4, linear.CPU_CHUNK])
def test_any_part_is_that_part_of_the_whole(shape, chunk):
    random = np.random.default_rng(0)
    everything = whole(shape)
    assert torch.isfinite(everything).all()
    with patch.object(linear, "CPU_CHUNK", chunk):
        for _ in range(20):
            start = tuple(int(random.integers(0, extent)) for extent in shape)
            size = tuple(
                int(random.integers(0, extent - first + 1)) for extent, first in zip(shape, start, strict=True)
            )
            window = tuple(slice(first, first + extent) for first, extent in zip(start, size, strict=True))
            assert torch.equal(shard(ShardSpec(shape, start, size)), everything[window])


def test_values_depend_on_seed_and_name():
    assert not torch.equal(whole((64, 8)), whole((64, 8), seed=1))
    assert not torch.equal(whole((64, 8)), whole((64, 8), name="v"))


def test_all_rows_and_columns_differ():
    values = whole((256, 16))
    assert torch.unique(values).numel() > 0.999 * values.numel()
    correlation = torch.corrcoef(whole((64, 4096))) - torch.eye(64)
    assert correlation.abs().max() < 5 / 4096**0.5
    assert (
        torch.corrcoef(torch.stack([whole((64, 4096)).flatten(), whole((64, 4096), name="v").flatten()]))[0, 1].abs()
        < 0.01
    )


def test_bits_are_pinned():
    """Initial weights are part of every experiment's identity: a change here changes every published curve."""
    expected = torch.tensor([0.5362654924, 0.0225525890, -0.6096718907])
    assert torch.equal(whole((4, 3), name="embedding.weight")[1], expected)
    digest = hashlib.sha256(whole((300, 333)).numpy().tobytes()).hexdigest()
    assert digest == "3837d37398793815d7f22a2b1ddfb3f64a412aa2f992b39e2f2e0bdce95f9ebd"


def test_parameters_of_any_memory():
    """bf16 rounds the fp32 numbers; strides do not matter; a scalar is a vector of one."""
    expected = whole((20, 6))
    rounded, transposed, scalar = torch.empty(20, 6, dtype=torch.bfloat16), torch.empty(6, 20).T, torch.empty(())
    for values in (rounded, transposed):
        init_shard_(values, 0, "w", NORMAL, ShardSpec.whole((20, 6)))
        assert torch.equal(values, expected.to(values.dtype))
    init_shard_(scalar, 0, "w", NORMAL, ShardSpec.whole(()))
    assert scalar == whole((1,))


def test_constants():
    assert torch.equal(shard(ShardSpec((4,), (0,), (2,)), init=InitSpec("ones")), torch.ones(2))
    assert torch.equal(shard(ShardSpec((4,), (1,), (3,)), init=InitSpec("zeros")), torch.zeros(3))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_shards_on_a_gpu_are_those_of_the_cpu_and_temporary_memory_is_bounded():
    part = ShardSpec((9000, 8191), (13, 5), (8000, 8001))
    values = torch.empty(part.size, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    init_shard_(values, 0, "w", NORMAL, part)
    assert torch.cuda.max_memory_allocated() - before < 128 * 2**20
    assert torch.equal(values.cpu(), shard(part))
