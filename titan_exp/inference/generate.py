"""Text from a run or from weights in any format: `titan-exp generate [RUN] [key=value …]`, on one device or several."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint, open_checkpoint
from titan_exp.checkpoint.remote.checkpoint_cache import local_copy
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.config.command_line.parse_options import HELP, options_help, parse_options
from titan_exp.config.command_line.verb_options import GenerateOptions
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.data.tokenizers.base import Tokenizer
from titan_exp.inference.generation import DecodeSession
from titan_exp.parallel.mesh import Mesh, build_mesh
from titan_exp.parallel.tensor_parallel.apply import apply_tensor_parallel, drop_unused_kv_rows
from titan_exp.rules import degrees as layout
from titan_exp.rules import tensor_parallel as tensor
from titan_exp.rules.rule import ask
from titan_exp.trainer.load_model import Rows, describe, load_source, tokenizer_of, training_length
from titan_exp.trainer.rank_call import RunOnRanks, answer

USAGE = """\
titan-exp generate [RUN|FOLDER] [prompt=...]
  for example: titan-exp generate runs/first/6ec54c999fca prompt="def " prompt="import " temperature=0"""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What `dtype` may be."""


def generate_command(arguments: Sequence[str], spread: RunOnRanks | None = None) -> int:
    """Run the verb; returns the exit code.

    Args:
        arguments: the words typed.
        spread: starts the ranks that `tp` asks for.

    Raises:
        UserError: an option is wrong, or there are no weights to generate from.
    """
    if set(arguments) & set(HELP):
        print(options_help(USAGE, GenerateOptions), end="")
        return 0
    options = parse_options(GenerateOptions, arguments, positional="run")
    prompts = _prompts(options, arguments)
    path = local_copy(options.run, step=options.step) if options.run else _latest_run(Path(options.runs))
    source = open_checkpoint(path, options.step)
    if options.tp == 1:
        texts = generate(source, options, prompts, window=training_length(path, source))
    else:
        assert spread is not None, "the command line has it"
        tokenizer_of(source)  # said here, and not by a rank
        question = {"path": str(path), "options": dataclasses.asdict(options), "prompts": prompts}
        texts = spread(f"{__name__}.rank_main", tensor_parallel_experiment(source, options.tp), question)
    for prompt, text in zip(prompts, texts, strict=True):
        print(f"{prompt}{text}\n")
    print(f"— {describe(path, source)}")
    return 0


def generate(
    source: OpenCheckpoint, options: GenerateOptions, prompts: Sequence[str], *, window: int, mesh: Mesh | None = None
) -> list[str]:
    """The texts that a model writes after prompts, without them; one after the other, each as if it were the only one.

    Args:
        source: weights with a tokenizer.
        options: how to choose.
        prompts: texts to go on from.
        window: longest sequence in tokens that the model is shown.
        mesh: whose tensor-parallel ranks share the model, all of them calling this; None is one device.

    Raises:
        UserError: nothing says which tokenizer the model has.
    """
    tokenizer = tokenizer_of(source)
    # Training never shows a document's first token without the end of the one before. Published models have a token
    # of their own for the begin of a text.
    begin = source.special_tokens.get("bos_token_id")
    first = begin if isinstance(begin, int) else tokenizer.end_of_text
    begun = [[first, *(int(token) for token in tokenizer.encode(prompt))] for prompt in prompts]
    window = min(window, max(map(len, begun)) + options.tokens)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if mesh is None else mesh.device

    def divide(model: nn.Module) -> Rows:
        assert mesh is not None, "there are others"
        apply_tensor_parallel(model, mesh, sequence_parallel=False, loss_parallel=False)
        return drop_unused_kv_rows(model)

    model = load_source(
        source, device, seq_len=window, dtype=DTYPES[options.dtype], divide=None if mesh is None else divide
    )
    writer = DecodeSession(model, window, cache=options.cache)
    ends = _ends(source, tokenizer)
    texts = []
    for ids in begun:
        writer.reset()
        random = torch.Generator(device).manual_seed(options.seed)
        start = len(ids)
        for _ in range(options.tokens):
            logits = writer.next_logits(ids)[: tokenizer.vocab_size]
            token = _agreed(sample_token(logits, options.temperature, options.top_k, options.top_p, random), mesh)
            if token in ends:
                break
            ids.append(token)
        texts.append(tokenizer.decode(ids[start:]))
    return texts


def rank_main(run_folder: str) -> None:
    """What each of several ranks runs."""

    def texts(experiment: Experiment, question: Any, device: torch.device) -> list[str]:
        path, options = Path(question["path"]), GenerateOptions(**question["options"])
        source, mesh = open_checkpoint(path, options.step), build_mesh(experiment.parallelism, device)
        return generate(source, options, question["prompts"], window=training_length(path, source), mesh=mesh)

    answer(run_folder, texts)


def tensor_parallel_experiment(source: OpenCheckpoint, degree: int) -> Experiment:
    """An experiment around a source's model that so many tensor-parallel ranks share.

    Raises:
        UserError: the model cannot be divided so, or there are not so many GPUs.
    """
    # Tokens come one at a time: there is no sequence to divide.
    words = [f"parallelism.tp={degree}", "parallelism.dp_shard=1", "parallelism.sequence_parallel=false"]
    experiment = dataclasses.replace(to_experiment(compose(words)), model=source.model)
    violations = ask((*tensor.RULES, *layout.RULES), experiment)
    if violations:
        raise UserError(
            "The model cannot be divided so.",
            [Violation("tp", degree, it.reason, it.remedy.replace("parallelism.tp", "tp")) for it in violations],
        )
    return experiment


def sample_token(logits: Tensor, temperature: float, top_k: int, top_p: float, random: torch.Generator) -> int:
    """Draw a token id.

    Args:
        logits: fp32 [vocab].
        temperature: 0 takes the largest.
        top_k: how many of the largest to draw from; 0 is all.
        top_p: share of what these hold together to draw from, largest first; the largest is always among them.
        random: generator on the logits' device.
    """
    if temperature == 0:
        return int(logits.argmax())
    probabilities, order = (logits / temperature).softmax(-1).sort(descending=True)
    if top_k:
        probabilities = probabilities[:top_k] / probabilities[:top_k].sum()
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.where(before < top_p, 0.0)
    return int(order[torch.multinomial(probabilities, 1, generator=random)])


def _agreed(token: int, mesh: Mesh | None) -> int:
    """Rank 0's choice: whatever order a device sums in, all ranks go on with one text."""
    if mesh is None:
        return token
    chosen = torch.tensor(token)
    dist.broadcast(chosen, src=0, group=mesh.cpu_group)
    return int(chosen)


def _prompts(options: GenerateOptions, arguments: Sequence[str]) -> list[str]:
    typed = [word.partition("=")[2] for word in arguments if word.startswith("prompt=")]
    if not options.prompts:
        return typed or [options.prompt]
    try:
        listed = Path(options.prompts).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"prompts={options.prompts} cannot be read: {error}") from error
    if not (found := [*typed, *(line for line in listed if line)]):
        raise UserError(f"prompts={options.prompts}: there is no line in it that is not empty.")
    return found


def _ends(source: OpenCheckpoint, tokenizer: Tokenizer) -> set[int]:
    """The tokens that end a text; published models may have several."""
    said = source.special_tokens.get("eos_token_id")
    return {tokenizer.end_of_text, *(said if isinstance(said, list) else [] if said is None else [said])}


def _latest_run(runs: Path) -> Path:
    found = [
        (checkpoint.stat().st_mtime, checkpoint.parent.parent)
        for checkpoint in runs.glob("*/*/checkpoints/step-*")
        if CheckpointFolder(checkpoint.parent).complete_steps()
    ]
    if not found:
        raise UserError(
            f"no run under {runs}/ has a checkpoint yet. Train one first (titan-exp train), or name its folder: "
            "titan-exp generate path/to/run"
        )
    return max(found)[1]
