from typing import Any

import pytest
import torch

from titan_exp.ops.attention.sdpa import CausalAttention, choose_backend, document_mask

# On CPU there is only the uncompiled FlexAttention, and torch says that it is slow.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Softmax attention written out, in fp64, keys and values repeated for their query heads."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v


def heads(kv_heads: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 4, 24, 16), torch.randn(2, kv_heads, 24, 16), torch.randn(2, kv_heads, 24, 16)


ON_CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


DOCUMENTS = torch.tensor([[0] * 10 + [1] * 14, [0] * 3 + [1] * 20 + [2]])


@pytest.mark.parametrize("backend", ["flash", "math", "flex"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_causal_attention_is_softmax_over_earlier_positions(backend, kv_heads):
    q, k, v = heads(kv_heads)
    causal = torch.ones(24, 24, dtype=torch.bool).tril()
    found = CausalAttention(backend)(q, k, v)
    torch.testing.assert_close(found, reference(q, k, v, causal).float(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("device", "backend"),
    [
        *(("cpu", backend) for backend in ("flash", "math")),
        *(pytest.param("cuda", kernel, marks=ON_CUDA) for kernel in ("flash", "efficient", "math", "flex")),
    ],
)
def test_values_may_be_narrower_than_keys(device: str, backend: Any, masked: bool):
    """Widths of DeepSeek, with a scale of its own: forward and backward."""
    if masked and (device, backend) == ("cuda", "flash"):
        pytest.skip("flash takes no mask on CUDA")
    torch.manual_seed(0)
    dtype, close = (torch.float32, 2e-5) if device == "cpu" else (torch.bfloat16, 3e-2)
    inputs = [torch.randn(2, 2, 24, width, device=device, dtype=dtype).requires_grad_() for width in (192, 192, 128)]
    core = CausalAttention(backend, scale=0.1)
    documents = DOCUMENTS.to(device)
    found = core(*inputs, core.mask(documents if masked else None, seq=24, device=inputs[0].device))
    assert found.shape == (2, 2, 24, 128)
    whole = [tensor.detach().double().requires_grad_() for tensor in inputs]
    seen = document_mask(documents) if masked else torch.ones(24, 24, dtype=torch.bool, device=device).tril()
    expected = reference(whole[0] * (0.1 * 192**0.5), whole[1], whole[2], seen)
    gradient = torch.randn_like(found)
    mine = (found, *torch.autograd.grad(found, inputs, gradient))
    theirs = (expected, *torch.autograd.grad(expected, whole, gradient.double()))
    for our, other in zip(mine, theirs, strict=True):
        assert (our.detach().double() - other.detach()).norm() < close * other.detach().norm()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_cudnn_leaves_a_single_key_to_another_kernel(device: str, documents: bool, kv_heads: int):
    """A CPU has no kernel of cuDNN, and shows that none is asked for."""
    random = torch.Generator().manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(2, n, 1, 16, generator=random).to(device, dtype) for n in (4, kv_heads, kv_heads))
    core = CausalAttention("cudnn")
    found = core(q, k, v, core.mask(torch.zeros(2, 1, dtype=torch.int64, device=device) if documents else None))
    torch.testing.assert_close(found, v.repeat_interleave(4 // kv_heads, 1))


@pytest.mark.parametrize("backend", ["flash", "math", "flex"])
def test_document_mask_hides_other_documents(backend):
    q, k, v = heads()
    core = CausalAttention(backend)
    found = core(q, k, v, core.mask(DOCUMENTS))
    torch.testing.assert_close(found, reference(q, k, v, document_mask(DOCUMENTS)).float(), atol=1e-6, rtol=1e-5)


def test_document_mask_gradients_stay_within_the_document():
    q, k, v = (tensor.requires_grad_() for tensor in heads())
    core = CausalAttention("flash")
    core(q, k, v, core.mask(DOCUMENTS))[0, :, 12].sum().backward()
    assert v.grad is not None
    assert v.grad[0, :, :10].abs().max() == 0
    assert v.grad[0, :, 10:13].abs().min() > 0


def test_backend_is_what_was_asked_for_or_the_devices_best():
    cpu = torch.device("cpu")
    assert choose_backend("auto", cpu, head_dims=[64], bf16=True, documents=True) == "flash"
    assert choose_backend("math", cpu, head_dims=[64], bf16=False, documents=False) == "math"


@pytest.mark.parametrize(
    ("head_dim", "bf16", "kernel"),
    [(64, True, "efficient"), (36, True, "math"), (36, False, "efficient"), (34, False, "math")],
)
def test_documents_take_a_kernel_for_the_width_of_a_head(head_dim: int, bf16: bool, kernel: str):
    """The efficient kernel reads 16 bytes at a time."""
    assert choose_backend("auto", torch.device("cuda"), head_dims=[head_dim], bf16=bf16, documents=True) == kernel


def test_the_gradient_of_narrower_values_lies_as_kernels_read_it():
    """Rows of all heads together: a kernel would copy it otherwise."""
    query, key = (torch.randn(2, 4, 24, 192, requires_grad=True) for _ in range(2))
    value = torch.randn(2, 4, 24, 128, requires_grad=True)
    out = CausalAttention("flash")(query, key, value)
    gradients: list[torch.Tensor] = []
    kernel = out.grad_fn
    while kernel is not None and "ScaledDotProduct" not in type(kernel).__name__:
        kernel = kernel.next_functions[0][0]
    assert kernel is not None
    kernel.register_prehook(lambda found: gradients.append(found[0]))
    out.transpose(1, 2).flatten(2).square().sum().backward()
    (gradient,) = gradients
    assert gradient.shape == query.shape
    assert gradient.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("device", "backend"),
    [
        *(("cpu", backend) for backend in ("flash", "math")),
        *(pytest.param("cuda", kernel, marks=ON_CUDA) for kernel in ("cudnn", "flash", "efficient", "math", "flex")),
    ],
)
def test_passes_of_grouped_heads_agree_with_the_reference(device: str, backend: Any, kv_heads: int, masked: bool):
    """Forward and backward, causal and within documents, in bf16 on a GPU; 192 tokens are not a multiple of 128."""
    if masked and (device, backend) == ("cuda", "flash"):
        pytest.skip("flash takes no mask on CUDA")
    torch.manual_seed(0)
    dtype, close = (torch.float32, 2e-5) if device == "cpu" else (torch.bfloat16, 3e-2)
    inputs = [torch.randn(2, n, 192, 64, device=device, dtype=dtype).requires_grad_() for n in (4, kv_heads, kv_heads)]
    documents = (torch.arange(192, device=device) // torch.tensor([[50], [77]], device=device)) if masked else None
    visible = torch.ones(192, 192, dtype=torch.bool, device=device).tril()
    core = CausalAttention(backend)
    found = core(inputs[0], inputs[1], inputs[2], core.mask(documents, seq=192, device=inputs[0].device))
    whole = [tensor.detach().double().requires_grad_() for tensor in inputs]
    seen = visible if documents is None else document_mask(documents)
    expected = reference(whole[0], whole[1], whole[2], seen)
    gradient = torch.randn_like(found)
    mine = (found, *torch.autograd.grad(found, inputs, gradient))
    theirs = (expected, *torch.autograd.grad(expected, whole, gradient.double()))
    for our, other in zip(mine, theirs, strict=True):
        error = (our.detach().double() - other.detach()).norm() / other.detach().norm()
        assert error < close


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_deterministic_attention_gives_the_same_bits_on_cuda(documents: bool, kv_heads: int):
    device = torch.device("cuda")
    torch.use_deterministic_algorithms(True)
    try:
        backend = choose_backend("auto", device, head_dims=[64], bf16=True, documents=documents, deterministic=True)
        core = CausalAttention(backend)
        q, k, v = (torch.randn(2, n, 1024, 64, device="cuda", dtype=torch.bfloat16) for n in (4, kv_heads, kv_heads))
        ids = (torch.arange(1024, device="cuda") // 300).expand(2, -1)
        gradients = []
        for _ in range(5):
            leaves = [head.clone().requires_grad_() for head in (q, k, v)]
            core(*leaves, core.mask(ids) if documents else None).float().square().sum().backward()
            gradients.append([leaf.grad for leaf in leaves])
        assert all(torch.equal(a, b) for other in gradients[1:] for a, b in zip(gradients[0], other, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("documents", [True, False])
def test_cuda_has_a_kernel_for_whatever_auto_chooses(bf16, documents):
    device = torch.device("cuda")
    q, k, v = (head.to(device, torch.bfloat16 if bf16 else torch.float32) for head in heads())
    core = CausalAttention(choose_backend("auto", device, head_dims=[16], bf16=bf16, documents=documents))
    core(q.requires_grad_(), k, v, core.mask(DOCUMENTS.to(device) if documents else None)).sum().backward()
    assert q.grad is not None
