"""QK-Clip: largest logits are those of the scores, and every layout scales heads as one device does."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.runs import LINES, Curve, assert_same_curve, train
from tests.parity.test_continued import assert_continues, continued
from tests.patching import patch
from titan_exp.ops.attention.attention_with_lse import raise_to_logits

MUON = ["optimizer=muon", "optimizer.lr=2e-3", "optimizer.eps=1e-4", *LINES]
CLIP = [*MUON, "optimizer.qk_clip=0.1"]
HEADS = "model.kv_heads=4"
"""Every query head of `llama_debug` has a key of its own."""
LATENT = "model=deepseek_debug"
LAYOUTS = [
    (HEADS, "parallelism.tp=2 parallelism.dp_shard=2"),
    ("", "parallelism.tp=4"),
    ("", "parallelism=hsdp training.micro_batch_size=1"),
    ("", "parallelism.pp=2 parallelism.dp_shard=2"),
    (HEADS, "activation_checkpoint=full training.micro_batch_size=2"),
    (HEADS, "parallelism.pp=2 parallelism.pp_schedule=ZBVZeroBubble parallelism.tp=2"),
    (HEADS, "compile=blocks compile.backend=aot_eager"),
    (HEADS, "parallelism.cp=2 parallelism.dp_shard=2"),
    (HEADS, "parallelism.cp=4 parallelism.cp_method=allgather activation_checkpoint=full"),
    (HEADS, "parallelism.cp=2 parallelism.cp_method=ulysses parallelism.tp=2"),
    (HEADS, "parallelism.cp=4 parallelism.cp_ulysses=2"),
    (HEADS, "parallelism.cp=2 compile=blocks compile.backend=aot_eager activation_checkpoint=full"),
    (HEADS, "parallelism.cp=2 parallelism.pp=2 activation_checkpoint=selective"),
    ("", "parallelism.cp=2 training.micro_batch_size=1"),
    (LATENT, "parallelism.cp=2 parallelism.cp_method=allgather"),
    (LATENT, "parallelism.cp=2 parallelism.dp_shard=2 parallelism.ep=2"),
    (LATENT, "parallelism.dp_shard=2 parallelism.tp=2"),
    (LATENT, "parallelism.pp=2 parallelism.dp_shard=2 parallelism.ep=2"),
]

DAILY = (LAYOUTS[0],)


def assert_clips_alike(found: Curve, expected: Curve) -> None:
    """The curve of one device, and its largest logits of every layer, one of which is clipped."""
    assert_same_curve(found, expected)
    names = [name for name in expected.rows[0] if name.startswith("model/max_logit")]
    assert len(names) > 2
    for row, other in zip(found.rows, expected.rows, strict=True):
        assert [row[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-4)
    assert max(row["model/max_logit"] for row in expected.rows[:-1]) > 0.1


@pytest.mark.parametrize(
    ("model", "layout"),
    [pytest.param(*layout, marks=pytest.mark.day if layout in DAILY else pytest.mark.night) for layout in LAYOUTS],
)
def test_layouts(tmp_path: Path, model: str, layout: str):
    own = [*CLIP, *model.split()]
    assert_clips_alike(train(tmp_path / "many", *own, *layout.split()), train(tmp_path / "one", *own))


@pytest.mark.night
@pytest.mark.parametrize(
    ("before", "after"), [("parallelism.dp_shard=2", "parallelism.tp=2"), ("", "parallelism.pp=2")]
)
def test_a_run_continues_in_another_layout(tmp_path: Path, before: str, after: str):
    own = [*CLIP, "training.seq_len=32"]
    assert_continues(*continued(tmp_path, [*own, *before.split()], [*own, *after.split()]))


@pytest.mark.night
def test_a_limit_that_no_logit_reaches_changes_nothing(tmp_path: Path):
    plain, clipped = train(tmp_path / "plain", *MUON), train(tmp_path / "clip", *MUON, "optimizer.qk_clip=100")
    assert clipped.loss == plain.loss
    assert all(torch.equal(clipped.weights[name], weight) for name, weight in plain.weights.items())


def ranks_clip_by_their_own_rows() -> None:
    patch("titan_exp.parallel.qk_clip.dist", lambda original: _OneRank())


def the_last_micro_batch_decides() -> None:
    def make(original: Any) -> Any:
        def forward(self: Any, *args: Any, **options: Any) -> None:
            self.reset_metrics()
            original(self, *args, **options)

        return forward

    patch("titan_exp.ops.attention.attention_with_lse.MaxLogits.forward", make)


def shards_take_the_first_rows_factors() -> None:
    def make(original: Any) -> Any:
        from dataclasses import replace

        def first(tensor: Any) -> Any:
            part = original(tensor)
            return replace(part, start=(0, *part.start[1:]))

        return first

    patch("titan_exp.parallel.qk_clip.local_shard", make)


def heads_of_every_rank_are_the_first() -> None:
    def make(original: Any) -> Any:
        def init(self: Any, *args: Any) -> None:
            original(self, *args)
            self._rank = 0

        return init

    patch("titan_exp.parallel.qk_clip.QKClip.__init__", make)


def keys_of_other_ranks_are_forgotten() -> None:
    """The largest logit over one context-parallel rank's own block."""

    def make(original: Any) -> Any:
        def blocks(self: Any, *args: Any) -> Any:
            module: Any = importlib.import_module("titan_exp.parallel.context_parallel.attention")
            for rank, block in original(self, *args):
                yield rank, block
                module.raise_to_logits = lambda *_, **__: None
            module.raise_to_logits = raise_to_logits

        return blocks

    patch("titan_exp.parallel.context_parallel.attention.RingKV.blocks", make)


def ulysses_ranks_have_the_first_heads() -> None:
    def make(original: Any) -> Any:
        def init(self: Any, *args: Any) -> None:
            original(self, *args)
            self._rank -= self._rank % 2

        return init

    patch("titan_exp.parallel.qk_clip.QKClip.__init__", make)


def logits_include_the_future() -> None:
    patch(
        "titan_exp.ops.attention.attention_with_lse.MaxLogits.forward",
        lambda original: (
            lambda self, query, key, visible, *, causal, scale: original(
                self, query, key, None, causal=False, scale=scale
            )
        ),
    )


@pytest.mark.night
@pytest.mark.parametrize(
    ("layout", "mutate"),
    [
        ("parallelism.dp_shard=2", ranks_clip_by_their_own_rows),
        ("training.micro_batch_size=1", the_last_micro_batch_decides),
        ("parallelism.dp_shard=2", shards_take_the_first_rows_factors),
        ("parallelism.tp=2", heads_of_every_rank_are_the_first),
        ("parallelism.cp=2", keys_of_other_ranks_are_forgotten),
        ("parallelism.cp=2 parallelism.cp_method=ulysses", ulysses_ranks_have_the_first_heads),
        ("", logits_include_the_future),
    ],
)
def test_mutations_are_noticed(tmp_path: Path, layout: str, mutate):
    own = [*CLIP, HEADS]
    found = train(tmp_path / "many", *own, *layout.split(), mutate=mutate)
    with pytest.raises(AssertionError):
        assert_clips_alike(found, train(tmp_path / "one", *own))


class _OneRank:
    """torch.distributed of a rank that believes to be alone."""

    def get_world_size(self) -> int:
        return 1
