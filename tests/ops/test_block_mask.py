"""Block masks of FlexAttention, computed per block, equal torch's, which looks at every pair of tokens."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from titan_exp.ops.attention.mask_pattern import CAUSAL, MaskPattern
from titan_exp.ops.attention.sdpa import CausalAttention, block_mask, pattern_mask

PATTERNS = [
    MaskPattern(),
    *(MaskPattern(window) for window in (1, 100, 128, 129, 300)),
    *(MaskPattern(chunk=chunk) for chunk in (1, 100, 128, 256, 384)),
    MaskPattern(200, 256),
    MaskPattern(400, 300),
]
SEGMENTS = {
    "few": lambda random, seq: (torch.rand(3, seq, generator=random) < 0.005).cumsum(1),
    "many": lambda random, seq: (torch.rand(3, seq, generator=random) < 0.1).cumsum(1),
    "of whole blocks": lambda random, seq: torch.arange(seq) // torch.tensor([[128], [256], [384]]),
}


def of_every_pair(pattern: MaskPattern, seq: int, segments: torch.Tensor | None) -> Any:
    def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
        return pattern.visible(q, k) & (True if segments is None else segments[b, q] == segments[b, k])

    return create_block_mask(visible, None if segments is None else len(segments), None, seq, seq, device="cpu")


def parts(mask: Any) -> dict[str, Any]:
    """Everything of a mask but its function."""
    kinds = ("q_num_blocks", "q_indices", "kv_num_blocks", "kv_indices")
    sides = [full + kind for full in ("", "full_") for kind in kinds]
    return {name: getattr(mask, name) for name in (*sides, "BLOCK_SIZE", "seq_lengths", "shape")}


@pytest.mark.parametrize("kind", ["none", *SEGMENTS])
@pytest.mark.parametrize("seq", [1, 40, 127, 128, 129, 640, 1000])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_blocks_are_those_of_every_pair(pattern: MaskPattern, seq: int, kind: str):
    pattern, random = pattern.within(seq), torch.Generator().manual_seed(seq)
    segments = None if kind == "none" else SEGMENTS[kind](random, seq)
    found = pattern_mask(pattern, seq, "cpu") if segments is None else block_mask(pattern, segments)
    expected = parts(of_every_pair(pattern, seq, segments))
    for name, mine in parts(found).items():
        other = expected[name]
        if isinstance(other, torch.Tensor):
            assert mine.dtype == other.dtype, name
            assert torch.equal(mine, other), name
        else:
            assert mine == other, name


def test_segments_in_any_order_miss_no_block():
    random = torch.Generator().manual_seed(0)
    segments = torch.randint(0, 3, (2, 8), generator=random).repeat_interleave(100, 1)
    found, exact = block_mask(MaskPattern(300), segments), of_every_pair(MaskPattern(300), 800, segments)
    assert not (exact.to_dense() > found.to_dense()).any()
    assert torch.equal(found.full_kv_num_blocks, exact.full_kv_num_blocks)


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor, and names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.names = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        self.names.add(func.overloadpacket.__name__)
        return out


@pytest.mark.parametrize("packed", [False, True])
def test_a_long_sequence_takes_the_memory_of_its_blocks(packed: bool):
    seq = 2**13
    segments = (torch.arange(seq) // 1000)[None]
    with _Largest() as largest:
        if packed:
            block_mask(MaskPattern(1000), segments)
        else:
            pattern_mask(MaskPattern(1000), seq, "cpu")
    assert largest.elements <= 2 * max(seq, (seq // 128) ** 2)
    assert "_local_scalar_dense" not in largest.names, "the device is not waited for"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_tracing_a_block_leaves_no_fake_mask():
    """Selective activation checkpointing traces a block first, and masks of causal layers are shared."""
    pattern_mask.cache_clear()
    core = CausalAttention("flex")
    mask = core.mask(None, seq=256, device=torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        core(*torch.empty(3, 1, 2, 256, 16).unbind(), mask)
    assert not isinstance(pattern_mask(CAUSAL, 256, "cpu").kv_indices, FakeTensor)
