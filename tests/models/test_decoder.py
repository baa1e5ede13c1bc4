from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.models.shapes import TINY, own_class, real_model
from titan_exp.config.errors.user_error import UserError
from titan_exp.models.build import build_model, flops_per_token, init_specs, parameter_count


def tokens(seq: int = 32, rows: int = 2) -> torch.Tensor:
    return torch.randint(0, 97, (rows, seq), generator=torch.Generator().manual_seed(0))


def test_a_token_sees_nothing_later():
    model, ids = real_model(), tokens()
    changed = ids.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 97
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:], atol=1e-4)


def test_masked_documents_are_computed_as_if_alone():
    model, ids = real_model(), tokens(rows=1)
    documents = torch.tensor([[0] * 12 + [1] * 20])
    packed = model(ids, documents=documents)
    # RoPE sees distances only, so a document's logits do not depend on where it starts.
    torch.testing.assert_close(packed[:, 12:], model(ids[:, 12:]), atol=1e-5, rtol=1e-4)
    positions = torch.cat((torch.arange(12), torch.arange(20)))[None]
    torch.testing.assert_close(model(ids, positions, documents), packed, atol=1e-5, rtol=1e-4)


def test_tied_head_is_the_embedding():
    tied = real_model(tied_embeddings=True)
    names = [name for name, _ in tied.named_parameters()]
    assert "head.weight" not in names
    assert parameter_count(real_model()) - parameter_count(tied) == 97 * 64
    loss = tied(tokens()).square().mean()
    loss.backward()
    # Rows that no token looks up still get a gradient, through the head.
    absent = sorted(set(range(97)) - set(tokens().flatten().tolist()))
    gradient = tied.get_parameter("embedding.weight").grad
    assert gradient is not None
    assert gradient[absent].abs().min() > 0


@pytest.mark.parametrize("seq", [16, 64])
def test_flops_count_what_is_executed(seq):
    """Against torch's own counter, whose attention is not causal: the formula's causal half is added back."""
    model = real_model()
    with FlopCounterMode(display=False) as counter:
        model(tokens(seq, rows=1)).sum().backward()
    unseen_keys = (seq - 1) / 2
    attention = 3 * TINY.layers * TINY.heads * unseen_keys * 2 * (2 * TINY.head_dim)
    # The first block's input needs a gradient, as in training, because of the embedding.
    assert counter.get_total_flops() == pytest.approx(seq * (flops_per_token(model, seq) + attention))


@pytest.mark.parametrize(
    ("shape", "published"),
    [
        ((32, 8, 14336, 128256), 8_030_261_248),
        ((32, 32, 11008, 32000), 6_738_415_616),
    ],
)
def test_parameter_count_is_the_published_one(shape, published):
    heads, kv_heads, ffn_dim, vocab = shape
    config = replace(TINY, layers=32, dim=4096, head_dim=128, heads=heads, kv_heads=kv_heads, ffn_dim=ffn_dim)
    with torch.device("meta"):
        model = build_model(replace(config, vocab_size=vocab), seq_len=16, attention_backend="math")
    assert parameter_count(model) == published


def test_every_parameter_says_how_it_starts():
    table = init_specs(real_model())
    assert table is not None
    assert table["norm.weight"].kind == "ones"
    assert table["blocks.1.attention.out.weight"].std == pytest.approx(0.02 / 2)
    assert table["blocks.1.attention.qkv.weight"].std == pytest.approx(0.02)


def test_a_model_of_the_users_own_is_called_with_the_group_and_options():
    config = own_class("tests.models.own_model.Bigram", scale=2.0)
    model = build_model(config, seq_len=16, attention_backend="math")
    assert model(tokens()).shape == (2, 32, 97)
    assert init_specs(model) is None


def test_a_missing_import_path_is_an_error():
    with pytest.raises(UserError, match=r"model\.architecture=tests\.models\.own_model\.Trigram"):
        build_model(replace(TINY, architecture="tests.models.own_model.Trigram"), seq_len=16, attention_backend="math")


def test_a_spec_that_differs_from_its_model_is_refused(monkeypatch: pytest.MonkeyPatch):
    from titan_exp.models import llama

    narrow = replace(TINY, ffn_dim=64)
    monkeypatch.setattr(llama, "block", lambda config, *rest, block=llama.block: block(narrow, *rest))
    with pytest.raises(UserError, match=r"the shape \(192, 64\) in `spec` and \(128, 64\) in the model"):
        build_model(TINY, seq_len=16, attention_backend="math")
