"""A model with weights from any format, on one device, for what comes after training."""

from pathlib import Path

import torch
from torch import nn

from titan_exp.checkpoint.source import Source
from titan_exp.config.convert import load_experiment
from titan_exp.config.errors import UserError
from titan_exp.data.tokenizer import ByteTokenizer, Tokenizer
from titan_exp.models.build import build_model
from titan_exp.ops.attention import choose_backend
from titan_exp.parallel.materialize import materialize


@torch.no_grad()
def load_source(source: Source, device: torch.device, *, seq_len: int, documents: bool = False) -> nn.Module:
    """Build the model of a source, and read its weights, in fp32, a tensor at a time.

    Args:
        source: the weights.
        device: where to.
        seq_len: longest sequence in tokens that the model will see.
        documents: whether it will be given document numbers.
    """
    backend = choose_backend(source.model.attention_backend, device, bf16=False, documents=documents)
    with torch.device("meta"):
        model = build_model(source.model, seq_len=seq_len, attention_backend=backend)
    materialize(model, device)
    for name, tensor in model.state_dict().items():
        if name not in source.parameters.shapes:
            raise UserError(f"{source.path} holds no {name}, which the model {source.model.name} has.")
        tensor.copy_(source.parameters.read(name))
    return model.eval()


def tokenizer_of(source: Source) -> Tokenizer:
    """The tokenizer of a source.

    Raises:
        UserError: nothing says which, or it cannot be read.
    """
    if source.tokenizer == "bytes":
        return ByteTokenizer()
    if source.tokenizer is None:
        raise UserError(
            f"{source.path} has no tokenizer beside its weights. Put its tokenizer.json there, or name a run folder."
        )
    from titan_exp.data.huggingface_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(source.tokenizer)


def training_length(path: Path, source: Source) -> int:
    """Sequence length in tokens of the run that the weights are from; the model's context where it is unknown."""
    for folder in (path, path.parent.parent):
        if source.format == "dcp" and (folder / "config.yaml").is_file():
            return load_experiment(folder / "config.yaml").training.seq_len
    return source.model.context


def describe(path: Path, source: Source) -> str:
    """A source in a few words."""
    if source.format == "dcp" and source.path.name.startswith("step-"):
        step = int(source.path.name.removeprefix("step-"))
        return f"{source.model.name} after step {step} of {path if path != source.path else path.parent.parent}"
    return str(source.path)
