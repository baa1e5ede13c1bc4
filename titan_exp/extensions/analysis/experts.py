"""Specialization of experts: classes (line breaks, keywords, word starts, digits, brackets, ...) of the tokens that are
routed to each expert, measured on held-out text."""

import keyword
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint, open_checkpoint
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.data.batch import Batch
from titan_exp.data.tokenizers import Tokenizer
from titan_exp.inference.evaluate import evaluate_source, evaluation_experiment, require_whole_sequences
from titan_exp.models.spec.lookup import has_routers
from titan_exp.ops.cross_entropy import IGNORE_INDEX
from titan_exp.ops.moe.routing import Routing
from titan_exp.parallel.mesh import Mesh, build_mesh
from titan_exp.trainer.distributed import joined_process_group
from titan_exp.trainer.experts import layer_label, routers_of
from titan_exp.trainer.objective import LanguageModeling
from titan_exp.trainer.restore import tokenizer_of

PATTERNS = {
    "line breaks": r"[\r\n]+",
    "indentation": r"(?<=\n)[ \t]+",
    "spaces": r"\s+",
    "keywords": rf"(?<!\w)(?:{'|'.join(keyword.kwlist)})(?!\w)",
    "capital letters": r"[A-Z]+",
    "word starts": r"(?<![^\W\d_])[^\W\d_]",
    "letters inside words": r"[^\W\d_]",
    "digits": r"\d+",
    "underscores": r"_+",
    "brackets": r"[()\[\]{}]",
    "quotes": r"[\"'`]",
    "operators": r"[-+*/%=<>!&|^~@]",
    "punctuation": r"[.,:;?#$\\]",
    "other characters": r"(?s:.)",
}
"""Regular expression of each class; the first match counts."""

CLASSES = (*PATTERNS, "ends of text")  # names of the classes, in the plural
_CODE = re.compile(r"^[ \t]*(?:def|class) \w+.*:[ \t]*$", re.MULTILINE)


class TokenClassifier:
    """Classifies tokens by their text; a token of several characters has the class of its first non-space character.
    Keywords are Python's, and count only in rows with Python definitions, because English has the same words."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.vocab_size = tokenizer, tokenizer.vocab_size
        self._texts: dict[int, str] = {}
        # All patterns as alternatives, one group each; without code, the group of keywords matches nothing.
        patterns = [{**PATTERNS, "keywords": "(?!)"}, PATTERNS]
        self._text, self._code = (re.compile("|".join(f"({one})" for one in each.values())) for each in patterns)

    def text(self, token: int) -> str:
        """Text of one token; empty for the end of text."""
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token])
        return self._texts[token]

    def classify(self, tokens: Sequence[int]) -> np.ndarray:
        """Index in `CLASSES` of each token of a row, int64 [tokens]."""
        texts = [self.text(token) for token in tokens]
        row = "".join(texts)
        classes = np.zeros(len(row), dtype=np.int64)
        pattern = self._code if _CODE.search(row) else self._text
        for match in pattern.finditer(row):
            assert match.lastindex is not None, "every pattern is a group"
            classes[match.start() : match.end()] = match.lastindex - 1
        lengths = np.array([len(text) for text in texts])
        # Place of the first non-space character, else of the last character.
        lead = np.array([min(len(text) - len(text.lstrip(" ")), len(text) - 1) for text in texts])
        places = np.cumsum(lengths) - lengths + np.maximum(lead, 0)
        if not row:
            return np.full(len(texts), CLASSES.index("ends of text"))
        found = classes[np.minimum(places, len(row) - 1)]
        return np.where(lengths == 0, CLASSES.index("ends of text"), found)


MAX_CELLS = 2**24  # layers · experts · vocabulary up to which each expert's tokens are counted individually
NAMED_TOKENS = 4  # number of an expert's most frequent tokens that are named
FEW_TOKENS = 50  # number of tokens below which an expert has no favourite class


@dataclass(frozen=True)
class Specialization:
    """Favourite class of one expert: the class that adds most to its divergence from all tokens."""

    expert: int
    tokens: int  # number of tokens routed to it
    favourite: str  # name of the class
    share: float  # share of the class among the expert's tokens
    overall: float  # share of the class among all tokens
    most_frequent: list[str] = field(default_factory=list)  # texts of its most frequent tokens of the class

    def __str__(self) -> str:
        shown = " ".join(repr(text)[1:-1] if text.strip() else repr(text) for text in self.most_frequent)
        return (
            f"expert {self.expert}: {self.share:.0%} of its {self.tokens:,} tokens are {self.favourite}, "
            f"{self.overall:.1%} of all tokens are{f'; most often {shown}' if shown else ''}"
        )


@dataclass(frozen=True)
class LayerSpecialization:
    """Specialization of the experts of a layer."""

    layer: str
    information: float  # mutual information of expert and class over the entropy of the class; 0 if ignored
    experts: list[Specialization]  # experts, most specialized first; experts with few tokens are left out
    unused: int  # number of experts that were left out

    @staticmethod
    def from_json(values: dict[str, Any]) -> "LayerSpecialization":
        """Read the dictionary of `dataclasses.asdict`."""
        experts = [Specialization(**expert) for expert in values["experts"]]
        return LayerSpecialization(values["layer"], values["information"], experts, values["unused"])


class ExpertClasses:
    """Counts of token classes by expert, filled by `observe`."""

    def __init__(self, model: torch.nn.Module, classifier: TokenClassifier, device: torch.device) -> None:
        self._classifier, vocab_size = classifier, classifier.vocab_size
        self._routers = {layer_label(name): router for name, router in routers_of(model)}
        cells = sum(router.moe.experts for router in self._routers.values()) * vocab_size
        self._vocab = vocab_size if cells <= MAX_CELLS else 0
        width = len(CLASSES) + self._vocab
        self.counts = {
            layer: torch.zeros(router.moe.experts, width, dtype=torch.int64, device=device)
            for layer, router in self._routers.items()
        }
        """Counts of choices [experts, classes + vocabulary] by layer."""
        self._device = device
        self._classes = self._tokens = np.zeros(0, dtype=np.int64)
        # A letter's class depends on its place, so a token has the class that it mostly has.
        self._classes_of_tokens = np.zeros((vocab_size if self._vocab else 0, len(CLASSES)), dtype=np.int64)

    @contextmanager
    def observe(self, batches: Mapping[str, Iterable[Batch]], most: int = 0) -> Iterator[dict[str, Iterable[Batch]]]:
        """Count the batches while the model runs on them; `most` limits the number of tokens, 0 means no limit."""
        hooks = [
            router.register_forward_hook(lambda _, __, routing, layer=layer: self._count(layer, cast(Routing, routing)))
            for layer, router in self._routers.items()
        ]
        try:
            yield {name: _Watched(source, self, most) for name, source in batches.items()}
        finally:
            for hook in hooks:
                hook.remove()

    def take(self, batch: Batch) -> int:
        """Classify the tokens of the next forward pass; returns the number that counts."""
        rows, valid = batch.tokens.tolist(), (batch.labels != IGNORE_INDEX).flatten().numpy()
        classes = np.concatenate([self._classifier.classify(row) for row in rows])
        self._classes = np.where(valid, classes, -1)
        self._tokens = batch.tokens.flatten().numpy()
        if self._vocab:
            np.add.at(self._classes_of_tokens, (self._tokens[valid], classes[valid]), 1)
        return int(valid.sum())

    def layers(self, mesh: Mesh) -> list[LayerSpecialization]:
        """Specialization of each layer's experts, from the counts of all data ranks."""

        def total(counts: torch.Tensor) -> np.ndarray:
            if mesh.world.size() > 1:
                torch.distributed.all_reduce(counts, group=mesh.cpu_group)
            return counts.numpy()

        classes_of_tokens = total(torch.from_numpy(self._classes_of_tokens.copy()))
        counted = {layer: total(counts.cpu().clone()) for layer, counts in self.counts.items()}
        return [self._layer(layer, counts, classes_of_tokens) for layer, counts in counted.items()]

    def _count(self, layer: str, routing: Routing) -> None:
        experts, counts = routing.experts, self.counts[layer]
        assert len(experts) == len(self._classes), "the router sees all tokens of the batch"
        classes = torch.from_numpy(self._classes).to(self._device)
        keys = [classes]
        if self._vocab:
            keys.append(torch.from_numpy(self._tokens).to(self._device) + len(CLASSES))
        for key in keys:
            cells = (experts * counts.shape[1] + key[:, None])[classes >= 0]
            counts += torch.bincount(cells.flatten(), minlength=counts.numel()).view_as(counts)

    def _layer(self, layer: str, counts: np.ndarray, classes_of_tokens: np.ndarray) -> LayerSpecialization:
        by_class = counts[:, : len(CLASSES)].astype(float)
        tokens, overall = by_class.sum(1), by_class.sum(0) / max(by_class.sum(), 1)
        shares = by_class / np.maximum(tokens, 1)[:, None]
        # Divergence of each expert's classes from all tokens' classes, class by class.
        gains = shares * np.log(np.where(shares > 0, shares, 1) / np.where(overall > 0, overall, 1))
        entropy = -sum(share * np.log(share) for share in overall if share > 0)
        information = float((tokens / max(tokens.sum(), 1) * gains.sum(1)).sum() / entropy) if entropy else 0.0
        used = [expert for expert in np.argsort(-gains.sum(1)).tolist() if tokens[expert] >= FEW_TOKENS]
        experts = []
        for expert in used:
            best = int(gains[expert].argmax())
            own = counts[expert, len(CLASSES) :]
            ordered = (token for token in np.argsort(-own, kind="stable").tolist() if own[token])
            frequent = islice((one for one in ordered if classes_of_tokens[one].argmax() == best), NAMED_TOKENS)
            share, everywhere = float(shares[expert, best]), float(overall[best])
            texts = [self._classifier.text(token) for token in frequent]
            experts.append(Specialization(expert, int(tokens[expert]), CLASSES[best], share, everywhere, texts))
        return LayerSpecialization(layer, information, experts, len(tokens) - len(used))


class _Watched:
    def __init__(self, source: Iterable[Batch], classes: ExpertClasses, most: int) -> None:
        self._source, self._classes, self._most = source, classes, most

    def __iter__(self) -> Iterator[Batch]:
        seen = 0
        for batch in self._source:
            seen += self._classes.take(batch)
            yield batch
            if self._most and seen >= self._most:
                return


class Experts:
    """Observation of `titan-exp evaluate`: which classes of tokens are routed to each expert."""

    def __init__(self, most_tokens: int = 0) -> None:
        self._most = most_tokens
        """Number of tokens after which the evaluation ends, on one device; 0 means all."""

    def require(self, experiment: Experiment) -> None:
        """Raise UserError if the model has no experts, or a rank would not see all tokens."""
        if not has_routers(experiment.model):
            reason = f"{experiment.model.name} has no experts with a router of ours"
            raise UserError(f"--experts: {reason}. Leave the flag out to see its loss alone.")
        require_whole_sequences(experiment, "--experts", "tp", "cp")

    def begin(
        self, model: torch.nn.Module, source: OpenCheckpoint, objective: LanguageModeling, mesh: Mesh
    ) -> LanguageModeling:
        """Prepare for a model; returns the same objective."""
        self._classes = ExpertClasses(model, TokenClassifier(tokenizer_of(source)), mesh.device)
        return objective

    def watch(self, batches: Mapping[str, Iterable[Batch]]) -> AbstractContextManager[Mapping[str, Iterable[Batch]]]:
        """Count the batches while the model runs on them."""
        return self._classes.observe(batches, self._most)

    def values(self, mesh: Mesh) -> list[dict[str, Any]]:
        """Fields of `LayerSpecialization`, from the counts of all data ranks."""
        return [asdict(layer) for layer in self._classes.layers(mesh)]

    @staticmethod
    def lines(values: Sequence[dict[str, Any]], tokens: int, *, most: int | None = None) -> Iterator[str]:
        """Text of the values, with at most `most` experts per layer, each with another favourite."""
        return lines([LayerSpecialization.from_json(layer) for layer in values], tokens, most=most)


def lines(layers: Sequence[LayerSpecialization], tokens: int, *, most: int | None = None) -> Iterator[str]:
    """Text of the specialization, with at most `most` experts per layer, each with another favourite."""
    yield f"experts on {tokens:,} tokens of held-out text, the most specialized first:"
    for layer in layers:
        name = layer.layer.replace("_", " ")
        yield f"  {name}: the choice of experts tells {layer.information:.0%} of a token's class"
        # Keep the first expert of each favourite class, which is the most specialized.
        distinct = {expert.favourite: expert for expert in reversed(layer.experts)}
        shown = layer.experts
        if most is not None:
            shown = [expert for expert in shown if distinct[expert.favourite] is expert][:most]
        yield from (f"    {expert}" for expert in shown)
        if layer.unused:
            yield f"    {layer.unused} of the experts had fewer than {FEW_TOKENS} tokens"


TOKENS = 2**15  # approximate number of held-out tokens that are classified
EXPERTS = 4  # number of experts per layer that are named


def learned_experts(run_folder: Path) -> Iterator[str]:
    """Lines about the most specialized experts of each layer, measured on held-out text on one device."""
    try:
        source = open_checkpoint(run_folder)
        experiment = evaluation_experiment(run_folder, source, [])
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with joined_process_group(device):
            mesh = build_mesh(experiment.parallelism, device, experts=True)
            observed = Experts(TOKENS)
            found = evaluate_source(source, experiment, mesh, observed={"experts": observed})
    except UserError as error:  # without checkpoint or held-out text, the run itself is complete
        yield f"we could not measure what its experts learned: {str(error).splitlines()[0]}"
        return
    yield from observed.lines(found.observed["experts"], found.result.tokens, most=EXPERTS)
