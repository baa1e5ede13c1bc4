"""Attention to parts of the keys, merged, is attention to all of them, and so are its gradients."""

import pytest
import torch
import torch.nn.functional as F

from titan_exp.ops.attention.attention_with_lse import HIDDEN, attention_backward, attention_forward, merge_lse


@pytest.mark.parametrize(("v_dim", "scale"), [(16, None), (8, 0.3)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_parts_merge_into_the_whole(kv_heads, masked, v_dim, scale):
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 24, width).requires_grad_()
        for heads, width in ((4, 16), (kv_heads, 16), (kv_heads, v_dim))
    )
    hidden = torch.zeros(2, 1, 24, 24, dtype=torch.bool)
    if masked:
        # Some rows see nothing of the second part at all.
        hidden[0, :, :10, 9:], hidden[1, :, 5, 3:] = True, True
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, HIDDEN)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=~hidden, scale=scale, enable_gqa=True)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)

    parts = [
        (key[:, :, keys].detach(), value[:, :, keys].detach(), bias[..., keys] if masked else None)
        for keys in (slice(0, 9), slice(9, 24))
    ]
    q = query.detach()
    (out, lse), (second, second_lse) = (
        attention_forward(q, k, v, bias=b, causal=False, backend="cpu", scale=scale) for k, v, b in parts
    )
    lse = lse.clone()
    merge_lse(out, lse, second, second_lse)
    torch.testing.assert_close(out, expected.detach(), atol=1e-6, rtol=1e-5)
    grads = [
        attention_backward(gradient, q, k, v, out=out, lse=lse, bias=b, causal=False, backend="cpu", scale=scale)
        for k, v, b in parts
    ]
    assert query.grad is not None
    assert key.grad is not None
    assert value.grad is not None
    torch.testing.assert_close(grads[0][0] + grads[1][0], query.grad, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(torch.cat([grads[0][1], grads[1][1]], dim=2), key.grad, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(torch.cat([grads[0][2], grads[1][2]], dim=2), value.grad, atol=2e-6, rtol=1e-5)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("backend", "bf16"), [("flash", True), ("efficient", True), ("efficient", False)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("v_dim", "scale"), [(16, None), (8, 0.3)])
def test_cuda_kernels_agree_with_the_cpu(backend, bf16, masked, v_dim, scale):
    if masked and backend == "flash":
        pytest.skip("flash takes no mask on CUDA")
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 24, 16), torch.randn(2, 2, 24, 16), torch.randn(2, 2, 24, v_dim)
    hidden = torch.ones(24, 24, dtype=torch.bool).triu(1).expand(2, 1, 24, 24).clone()
    hidden[0, :, 12:, :9] = True
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, HIDDEN)
    gradient = torch.randn(2, 4, 24, v_dim)

    def on(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v, g, b = (tensor.to(device, dtype) for tensor in (query, key, value, gradient, bias))
        b, kernel = b if masked else None, "cpu" if device == "cpu" else backend
        how = {"bias": b, "causal": not masked, "backend": kernel, "scale": scale}
        out, lse = attention_forward(q, k, v, **how)
        grads = attention_backward(g, q, k, v, out=out, lse=lse, **how)
        return [tensor.float().cpu() for tensor in (out, lse, *grads)]

    found = on("cuda", torch.bfloat16 if bf16 else torch.float32)
    close = 3e-2 if bf16 else 2e-5
    for cuda, cpu in zip(found, on("cpu", torch.float32), strict=True):
        torch.testing.assert_close(cuda, cpu, atol=close, rtol=close)
