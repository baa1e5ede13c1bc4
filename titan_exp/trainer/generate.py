"""Text from a trained run: `titan-exp generate [RUN] [key=value …]`, on one device."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor, nn

from titan_exp.checkpoint.checkpointer import load_model
from titan_exp.checkpoint.folder import CheckpointFolder
from titan_exp.config.bounds import Count, NonNegativeFloat, PositiveInt
from titan_exp.config.convert import load_experiment
from titan_exp.config.errors import UserError
from titan_exp.config.experiment import Experiment
from titan_exp.config.options import parse_options
from titan_exp.data.tokenizer import build_tokenizer
from titan_exp.models.build import build_model
from titan_exp.ops.attention import choose_backend
from titan_exp.parallel.materialize import materialize
from titan_exp.tracking.run_folder import RunFolder


@dataclass(frozen=True)
class GenerateOptions:
    """What `titan-exp generate` takes."""

    run: str = ""
    """Run folder; empty is the run under `runs` that was last saved."""
    runs: str = "runs"
    """Folder that holds every run folder, searched where `run` is not given."""
    prompt: str = ""
    """Text to go on from; empty begins a new document."""
    tokens: PositiveInt = 400
    """Tokens to write at most; the end of a document ends the text."""
    temperature: NonNegativeFloat = 0.8
    """Spread of the choice: 0 always takes the likeliest token, 1 samples as the model believes."""
    top_p: Annotated[float, Interval(gt=0, le=1)] = 0.95
    """Sample among the likeliest tokens that together hold this share (Holtzman et al. 2020)."""
    seed: Count = 0
    """Seed of the choice."""


def generate_command(arguments: list[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: an option is wrong, or there is no saved run to generate from.
    """
    options = parse_options(GenerateOptions, arguments, positional="run")
    folder = RunFolder(options.run) if options.run else _latest_run(Path(options.runs))
    steps = CheckpointFolder(folder.checkpoints).complete()
    if not steps:
        raise UserError(f"{folder.path} holds no complete checkpoint. Runs with one are listed by: ls -d runs/*/*/")
    text = generate(folder, steps[-1], options)
    print(f"{options.prompt}{text}")
    print(f"\n— {load_experiment(folder.config).model.name} after step {steps[-1]} of {folder.path}")
    return 0


def generate(folder: RunFolder, step: int, options: GenerateOptions) -> str:
    """The text that the model of a checkpoint writes after the prompt, without the prompt."""
    experiment = load_experiment(folder.config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = _load(experiment, CheckpointFolder(folder.checkpoints).at(step), device)
    tokenizer = build_tokenizer(experiment.data)
    random = torch.Generator(device).manual_seed(options.seed)
    # Training never shows a document's first token without the end of the one before.
    ids = [tokenizer.end_of_text, *(int(token) for token in tokenizer.encode(options.prompt))]
    prompt = len(ids)
    for _ in range(options.tokens):
        window = torch.tensor([ids[-experiment.training.seq_len :]], device=device)
        with torch.no_grad():
            logits = model(window)[0, -1, : tokenizer.vocab_size]
        token = choose(logits.float(), options.temperature, options.top_p, random)
        if token == tokenizer.end_of_text:
            break
        ids.append(token)
    return tokenizer.decode(ids[prompt:])


def choose(logits: Tensor, temperature: float, top_p: float, random: torch.Generator) -> int:
    """Draw a token id.

    Args:
        logits: fp32 [vocab].
        temperature: 0 takes the largest.
        top_p: share of probability to draw from, largest first; the largest is always among them.
        random: generator on the logits' device.
    """
    if temperature == 0:
        return int(logits.argmax())
    probabilities, order = (logits / temperature).softmax(-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.where(before < top_p, 0.0)
    return int(order[torch.multinomial(probabilities, 1, generator=random)])


def _load(experiment: Experiment, path: Path, device: torch.device) -> nn.Module:
    backend = choose_backend(experiment.model.attention_backend, device, bf16=False, documents=False)
    with torch.device("meta"):
        model = build_model(experiment.model, seq_len=experiment.training.seq_len, attention_backend=backend)
    materialize(model, device)
    load_model(path, model)
    return model.eval()


def _latest_run(runs: Path) -> RunFolder:
    found = [
        (checkpoint.stat().st_mtime, checkpoint.parent.parent)
        for checkpoint in runs.glob("*/*/checkpoints/step-*")
        if CheckpointFolder(checkpoint.parent).complete()
    ]
    if not found:
        raise UserError(
            f"no run under {runs}/ has a checkpoint yet. Train one first (titan-exp train), or name its folder: "
            "titan-exp generate path/to/run"
        )
    return RunFolder(max(found)[1])
