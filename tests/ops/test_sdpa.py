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


DOCUMENTS = torch.tensor([[0] * 10 + [1] * 14, [0] * 3 + [1] * 20 + [2]])


@pytest.mark.parametrize("backend", ["flash", "math", "flex"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_causal_attention_is_softmax_over_earlier_positions(backend, kv_heads):
    q, k, v = heads(kv_heads)
    causal = torch.ones(24, 24, dtype=torch.bool).tril()
    found = CausalAttention(backend)(q, k, v)
    torch.testing.assert_close(found, reference(q, k, v, causal).float(), atol=1e-6, rtol=1e-5)


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
    assert choose_backend("auto", cpu, head_dim=64, bf16=True, documents=True) == "flash"
    assert choose_backend("math", cpu, head_dim=64, bf16=False, documents=False) == "math"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient", "math", "flex"])
def test_cuda_backends_agree_with_the_reference(backend):
    q, k, v = (torch.randn(2, n, 256, 64, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2))
    causal = torch.ones(256, 256, dtype=torch.bool, device="cuda").tril()
    found = CausalAttention(backend)(q, k, v)
    torch.testing.assert_close(found.double(), reference(q, k, v, causal), atol=2e-2, rtol=2e-2)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("documents", [True, False])
def test_cuda_has_a_kernel_for_whatever_auto_chooses(bf16, documents):
    device = torch.device("cuda")
    q, k, v = (head.to(device, torch.bfloat16 if bf16 else torch.float32) for head in heads())
    core = CausalAttention(choose_backend("auto", device, head_dim=16, bf16=bf16, documents=documents))
    core(q.requires_grad_(), k, v, core.mask(DOCUMENTS.to(device) if documents else None)).sum().backward()
    assert q.grad is not None
