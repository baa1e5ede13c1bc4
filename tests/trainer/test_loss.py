import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.models.shapes import real_model
from titan_exp.data.batch import Batch
from titan_exp.trainer.loss import TokenLoss

VOCAB, SEQ = 4001, 64


def batch() -> Batch:
    tokens = torch.arange(2 * SEQ).reshape(2, SEQ)
    return Batch(tokens=tokens, labels=tokens + 1, positions=None, documents=None)


class Largest(TorchDispatchMode):
    """The most elements that any tensor had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


def trained(token_loss: TokenLoss, tied: bool) -> tuple[float, int, dict[str, Tensor]]:
    model = real_model(vocab_size=VOCAB, tied_embeddings=tied)
    with Largest() as largest:
        objective, cross_entropy = token_loss(model, batch())
        (objective / 128).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return float(cross_entropy), largest.elements, gradients


def test_the_model_never_holds_all_logits():
    for tied in (False, True):
        whole_loss, whole_largest, whole = trained(TokenLoss(z_loss=0.01), tied)
        loss, largest, chunked = trained(TokenLoss(chunk_tokens=16, z_loss=0.01), tied)
        assert whole_largest == 2 * SEQ * VOCAB
        assert largest == VOCAB * 64  # the embedding's gradient
        assert abs(loss / whole_loss - 1) < 1e-6
        for name, gradient in whole.items():
            torch.testing.assert_close(chunked[name], gradient, atol=1e-6, rtol=1e-4)


def test_evaluation_holds_nothing_larger_than_the_head():
    model = real_model(vocab_size=VOCAB).eval()
    with torch.no_grad(), Largest() as largest:
        TokenLoss(chunk_tokens=16)(model, batch())
    assert largest.elements == max(16 * VOCAB, VOCAB * 64)
