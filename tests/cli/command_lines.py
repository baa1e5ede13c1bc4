"""Random command lines for the fuzzer: verbs, flags, real keys and options with wrong values, damaged files."""

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

from titan_exp.config.extension import CONF_DIR, shipped_options
from titan_exp.config.schema.schema import annotation_of, choices_of, keys, value_keys
from titan_exp.config.study.study_file import SWEEPS_DIR

WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("fuzz_words.json").read_text(encoding="utf-8"))
"""Wrong values, overrides, flags, options, names, and contents of damaged files, by kind."""

VERBS = {
    "train": 10,
    "plan": 3,
    "plan search": 2,
    "sweep": 2,
    "status": 1,
    "compare": 2,
    "generate": 1,
    "evaluate": 1,
    "convert": 1,
    "logs": 1,
    "retry": 2,
    "cancel": 1,
    "tokenize": 2,
    "show": 1,
    "diff": 1,
    "help": 1,
    "": 1,
}
"""Verbs and how often each is drawn."""


@cache
def options_by_group() -> dict[str, list[str]]:
    """Options of every shipped config group."""
    folders = [path for path in sorted(CONF_DIR.rglob("*")) if path.is_dir() and path.name != "local"]
    names = [str(path.relative_to(CONF_DIR)) for path in folders]
    return {name: [*shipped_options(name)] for name in names}


@cache
def _studies() -> list[str]:
    return sorted(path.stem for path in SWEEPS_DIR.glob("*.yaml"))


class CommandLines:
    """Random command lines, drawn with one generator; damaged files are written into the current folder."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def draw(self) -> list[str]:
        """One command line without the program's name."""
        verb = self.rng.choices(list(VERBS), list(VERBS.values()))[0]
        words = [*self._head(verb), *(self._word(verb) for _ in range(self.rng.choice((0, 1, 1, 2, 2, 3, 5))))]
        if self.rng.random() < 0.1:
            self.rng.shuffle(words)
        if any(word.endswith(("=broken", "[broken]")) for word in words):
            words.append("--config-dir=mine")
        # Sweeps are planned; a point that is started would start for good.
        sweeps = verb == "sweep" or {"-m", "--multirun"} & set(words) or "MULTIRUN" in " ".join(words)
        return [*verb.split(), *words, *(["--dry-run"] if sweeps else [])]

    def _head(self, verb: str) -> list[str]:
        """Words without which most lines of a verb end at once."""
        rng, pick = self.rng, self.rng.choice
        if verb == "train":
            views = ("--cfg job", "--cfg job --resolve", "--cfg all", "--cfg hydra", "--info defaults", "--help")
            return [*pick((*views, "", "", "", "", "-m", "-m --skip", "data.preview=1")).split()]
        if verb == "sweep":
            return [pick((*_studies(), *_studies(), self._study_file(), pick(WORDS["names"])))]
        if verb == "tokenize":
            return ["out=store", "data=text"] if rng.random() < 0.5 else []
        if verb in ("plan", "plan search"):
            return pick(([], ["cluster=slurm_h100"], ["model=llama_debug"], ["cluster=slurm_h100", "model=llama3_8b"]))
        if verb in ("", "help"):
            return [pick((*WORDS["names"], "trian", "plans", "checkpoints", "--version", "-sc", "model=llama_debug"))]
        return [pick(WORDS["names"]) for _ in range(pick((0, 1, 1, 2)))]

    def _word(self, verb: str) -> str:
        takes_overrides = verb in ("train", "plan", "plan search", "sweep", "tokenize", "evaluate", "retry")
        common: tuple[Callable[[], str], ...] = (self._value, self._value, self._value, self._group, self._mutated)
        rare: tuple[Callable[[], str], ...] = (
            lambda: self.rng.choice(WORDS["junk"]),
            lambda: self.rng.choice(WORDS["hydra"]),
            lambda: self.rng.choice(WORDS["flags"]),
            lambda: self.rng.choice(WORDS["options"]),
            self._own_file,
        )
        other: tuple[Callable[[], str], ...] = (
            lambda: self.rng.choice(WORDS["options"]),
            lambda: self.rng.choice(WORDS["flags"]),
            lambda: self.rng.choice(WORDS["names"]),
            lambda: self.rng.choice(WORDS["junk"]),
        )
        return self.rng.choice((*common, *rare) if takes_overrides else (*other, self._value))()

    def _value(self) -> str:
        """Override of a real key; one of four values is right for its type."""
        rng = self.rng
        key = rng.choice(value_keys() if rng.random() < 0.9 else keys())
        choices = choices_of(annotation_of(key)) or ["1"]
        value = rng.choice(choices) if rng.random() < 0.25 else rng.choice(WORDS["values"])
        prefix = rng.choice(("", "", "", "", "", "", "+", "++", "~"))
        return f"{prefix}{key}" if prefix == "~" and rng.random() < 0.5 else f"{prefix}{key}={value}"

    def _group(self) -> str:
        """Choice of a group, right or wrong."""
        rng = self.rng
        group = rng.choice(list(options_by_group()))
        options = options_by_group()[group] or ["x"]
        package = rng.choice(("", "", "", "", "@x", "@_global_", f"@{group}", "@x:y", "@:"))
        one, other = rng.choice(options), rng.choice(options)
        forms = (one, f"[{one}]", f"[{one},{other}]", f"{one},{other}", f"{{{one}:1}}", f"{one}.yaml", f"/{one}")
        wrong = ("null", "[]", "[null]", "[[a]]", "glob(*)", "", "nope", "1", "${model}", rng.choice(WORDS["values"]))
        value = one if rng.random() < 0.3 else rng.choice((*forms, *wrong))
        return f"{rng.choice(('', '', '', '', '+', '++', '~'))}{group}{package}={value}"

    def _mutated(self) -> str:
        """Valid override with one or two characters changed."""
        rng = self.rng
        letters = list(f"{rng.choice(value_keys())}={rng.choice(('1', 'true', 'adamw', '[a,b]', '1e-3'))}")
        for _ in range(rng.choice((1, 1, 2))):
            place = rng.randrange(len(letters))
            letters[place] = rng.choice(("", "", *"=.:,+~@/[]{}()$'\"\\ #", letters[place] * 2, "é", "-", "_"))
        return "".join(letters)

    def _own_file(self) -> str:
        """Option in a damaged file of the user's."""
        rng = self.rng
        group = rng.choice(("optimizer", "model", "experiment", "data", "cluster"))
        path = Path("mine") / group / "broken.yaml"
        self._write(path, rng.choice(WORDS["broken_yaml"]))
        return rng.choice((f"{group}=broken", f"+{group}=broken", f"{group}=[broken]"))

    def _study_file(self) -> str:
        rng = self.rng
        path = Path("sweeps") / "broken.yaml"
        text = rng.choice((*WORDS["broken_study"], *WORDS["broken_yaml"]))
        if rng.random() < 0.4:
            text = self._damaged(Path(SWEEPS_DIR / f"{rng.choice(_studies())}.yaml").read_text())
        self._write(path, text)
        return rng.choice((str(path), "broken"))

    def _damaged(self, text: str) -> str:
        lines = text.splitlines()
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            place = self.rng.randrange(len(lines))
            line = lines[place]
            changes = ([], [line, line], [f"\t{line}"], [line[1:]], [f"  {line}"], [line + self.rng.choice(":[]{},'")])
            lines[place : place + 1] = self.rng.choice(changes)
            lines = lines or [""]
        return "\n".join(lines)

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
        if self.rng.random() < 0.05:
            path.mkdir()  # a folder in place of a file
        else:
            path.write_bytes(text.encode("latin-1" if text.startswith("\xff") else "utf-8", "surrogateescape"))
