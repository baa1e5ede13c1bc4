"""Text from a run or from weights in any format: `titan-exp generate [RUN] [key=value …]`, on one device."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from titan_exp.checkpoint.folder import CheckpointFolder
from titan_exp.checkpoint.located import local_copy
from titan_exp.checkpoint.source import Source, open_source
from titan_exp.config.bounds import Count, NonNegativeFloat, PositiveInt
from titan_exp.config.errors import UserError
from titan_exp.config.options import HELP, options_help, parse_options
from titan_exp.data.tokenizer import Tokenizer
from titan_exp.trainer.weights import describe, load_source, tokenizer_of, training_length
from titan_exp.trainer.writer import Writer


@dataclass(frozen=True)
class GenerateOptions:
    """What `titan-exp generate` takes."""

    run: str = ""
    """Run folder, one of its checkpoints, a Hugging Face folder, anything else that `convert` reads, or the URL of
    one of these; empty is the run under `runs` that was last saved."""
    step: Count = 0
    """Of a run: which checkpoint; 0 is the newest."""
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
    cache: bool = True
    """Keep keys and values, so that every token is computed once; without, the text is computed anew for each."""


def generate_command(arguments: list[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: an option is wrong, or there are no weights to generate from.
    """
    if set(arguments) & set(HELP):
        print(options_help("titan-exp generate [RUN|FOLDER] [prompt=...]", GenerateOptions), end="")
        return 0
    options = parse_options(GenerateOptions, arguments, positional="run")
    path = local_copy(options.run, step=options.step) if options.run else _latest_run(Path(options.runs))
    source = open_source(path, options.step)
    text = generate(source, options, window=training_length(path, source))
    print(f"{options.prompt}{text}")
    print(f"\n— {describe(path, source)}")
    return 0


def generate(source: Source, options: GenerateOptions, *, window: int) -> str:
    """The text that a model writes after the prompt, without the prompt.

    Args:
        source: weights with a tokenizer.
        options: how to choose.
        window: longest sequence in tokens that the model is shown.

    Raises:
        UserError: nothing says which tokenizer the model has.
    """
    tokenizer = tokenizer_of(source)
    prompt = [int(token) for token in tokenizer.encode(options.prompt)]
    # Training never shows a document's first token without the end of the one before. Published models have a token
    # of their own for the begin of a text.
    begin = source.special_tokens.get("bos_token_id")
    ids = [begin if isinstance(begin, int) else tokenizer.end_of_text, *prompt]
    window = min(window, len(ids) + options.tokens)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_source(source, device, seq_len=window)
    writer = Writer(model, window, cache=options.cache)
    random = torch.Generator(device).manual_seed(options.seed)
    ends, start = _ends(source, tokenizer), len(ids)
    for _ in range(options.tokens):
        logits = writer.next_logits(ids)[: tokenizer.vocab_size]
        token = choose(logits, options.temperature, options.top_p, random)
        if token in ends:
            break
        ids.append(token)
    return tokenizer.decode(ids[start:])


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


def _ends(source: Source, tokenizer: Tokenizer) -> set[int]:
    """The tokens that end a text; published models may have several."""
    said = source.special_tokens.get("eos_token_id")
    return {tokenizer.end_of_text, *(said if isinstance(said, list) else [] if said is None else [said])}


def _latest_run(runs: Path) -> Path:
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
    return max(found)[1]
