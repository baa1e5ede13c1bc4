"""Exports opened by other tools, if installed: torchtune and the lm-evaluation-harness."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.tools import in_memory, kind, weights
from titan_exp.checkpoint.formats.export_weights import ExportOptions, export_weights
from titan_exp.models.build import build_model
from titan_exp.models.spec.rope import RopeConfig

pytestmark = [
    pytest.mark.slow,
    # What other projects warn of is theirs.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("form", ["huggingface", "llama", "torchtune"])
@pytest.mark.parametrize("name", ["llama3", "llama3_2"])
def test_torchtune_computes_the_same(name: str, form: str, tmp_path: Path):
    """Each of its three checkpointers, and its own Llama."""
    training = pytest.importorskip("torchtune.training", exc_type=ImportError)
    rope = kind(name).rope
    if rope.scaling == "llama3":
        rope = RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)  # torchtune knows no other original context
    config = replace(kind(name), rope=rope)
    export_weights(in_memory(name, model=config), tmp_path / "export", ExportOptions(form))
    checkpointer, file = {
        "huggingface": (training.FullModelHFCheckpointer, "model.safetensors"),
        "llama": (training.FullModelMetaCheckpointer, "consolidated.00.pth"),
        "torchtune": (training.FullModelTorchTuneCheckpointer, "model.pt"),
    }[form]
    loaded = checkpointer(
        checkpoint_dir=str(tmp_path / "export"),
        checkpoint_files=[file],
        model_type="LLAMA3_2" if name == "llama3_2" else "LLAMA3",
        output_dir=str(tmp_path / "output"),
    ).load_checkpoint()
    theirs = _torchtune_model(name)
    theirs.load_state_dict(loaded["model"])
    ours = build_model(config, seq_len=128, attention_backend="math")
    ours.load_state_dict(weights(name))
    ours.reset_buffers()  # type: ignore[operator]  # the decoder's own
    ids = torch.randint(0, 97, (2, 128))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).float(), atol=5e-6, rtol=1e-5)


def _torchtune_model(name: str) -> Any:
    config = kind(name)
    shape = {
        "vocab_size": 97,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": config.kv_heads,
        "embed_dim": 64,
        "max_seq_len": 128,
        "intermediate_dim": 128,
        "rope_base": 500000,
        "norm_eps": 1e-5,
    }
    if name == "llama3_2":
        from torchtune.models.llama3_2._component_builders import llama3_2  # type: ignore[import-not-found]

        return llama3_2(**shape, scale_factor=32).eval()
    from torchtune.models.llama3 import llama3  # type: ignore[import-not-found]

    return llama3(**shape).eval()


def test_lm_evaluation_harness_measures_what_we_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A task of our own, whose documents are a local file: nothing is fetched."""
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = replace(kind("llama3"), vocab_size=257)
    ours = build_model(config, seq_len=128, attention_backend="math")
    torch.manual_seed(0)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    ours.reset_buffers()  # type: ignore[operator]  # the decoder's own
    from titan_exp.checkpoint.formats.torch_file import TorchFileReader

    store = TorchFileReader({key: value.detach() for key, value in ours.state_dict().items()})
    special = {"bos_token_id": 256, "eos_token_id": 256}
    source = in_memory("llama3", model=config, parameters=store, tokenizer="bytes", special_tokens=special)
    export_weights(source, tmp_path / "export", ExportOptions("huggingface"))
    texts = ["def main():", "A byte is a token here."]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "own.yaml").write_text(
        f"task: own_texts\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/texts.jsonl}}}}\n"
        "test_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list: [{metric: byte_perplexity}]\n"
    )
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

    results = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={tmp_path}/export,dtype=float32",
        tasks=["own_texts"],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks")),
        device="cpu",
        batch_size=1,
        bootstrap_iters=0,
    )
    found = results["results"]["own_texts"]["byte_perplexity,none"]
    nats = 0.0
    for text in texts:
        ids = torch.tensor([[256, *text.encode()]])
        with torch.no_grad():
            nats += torch.nn.functional.cross_entropy(ours(ids)[0, :-1], ids[0, 1:], reduction="sum").item()
    assert found == pytest.approx(math.exp(nats / sum(len(text.encode()) for text in texts)), rel=1e-5)
