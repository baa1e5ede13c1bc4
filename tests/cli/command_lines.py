"""Random command lines for the fuzzer: verbs, flags, real keys and options with wrong values, damaged files."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from titan_exp.config.hydra.compose import CONF_DIR
from titan_exp.config.schema.schema import choices_of, annotation_of, keys, value_keys
from titan_exp.config.study.study_file import SWEEPS_DIR

LONG = "x" * 300
VALUES = (
    # scalars of every type
    *("", "null", "true", "yes", "0", "1", "-1", "2", "8", "1e3", "1e-3", "1e400", "-1e400", "nan", "inf", "-inf", "0x10"),
    *("10_000", "4k", "1.5", "99999999999999999999999999", "0.1.2", "3 hours", "'3 hours'", "bf16", "adamw", "auto", "???"),
    # lists and mappings
    *("[]", "[1]", "[a,b]", "[[1],[2]]", "[null]", "[1,'a',{b:2}]", "{}", "{a:1}", "{a:{b:[1]}}", "{1:2}", "{null:1}"),
    *("{'':1}", "{a.b:1}", "{true:1}", "{1.5:2}", "[${training.steps}]", "{a:${nope}}"),
    # sweeps
    *("1,2", "a,b", "[1],[2]", "range(1,4)", "range(4)", "choice(1,2)", "interval(0,1)", "glob(*)", "glob(a*,exclude=ab)"),
    *("shuffle(1,2,3)", "sort(3,1)", "tag(a,1,2)", "int(3.5)", "float(x)", "str(1)", "bool(yes)", "json_str(1)", "f(1)"),
    *("cast(1)", "extend_list(1)", "list_extend(1)", ",", "1,", ",1", "range(0,1,0)", "range()", "range(a)", "choice()"),
    # interpolations: valid, relative, cyclic, unknown, malformed
    *("${training.steps}", "${.name}", "${..training.steps}", "${experiment.name}", "${optimizer}", "${.}", "${..}"),
    *("${nope}", "${nope.x}", "${oc.env:HOME}", "${oc.env:NOT_SET}", "${oc.env:NOT_SET,1}", "${nores:1}", "${", "$", "${}"),
    *("${a", "${oc.env}", "${oc.select:nope,3}", "${oc.create:{a:1}}", "${hydra:job.name}", "${hydra:nope}", "${now:%Y}"),
    *("${quotient:7,2}", "${quotient:7,0}", "${quotient:a,b}", "${share_of:a,b}", "${rest_of:1}", "${hydra.job.name}"),
    *("${hydra:runtime.choices.model}", "${oc.decode:'[1'}", "${oc.decode:null}", "${oc.dict.keys:optimizer}", "${model.name}"),
    *("\\${x}", "${${experiment.name}}", "${training[steps]}", "${training.steps}${training.steps}", "${oc.deprecated:a}"),
    # text
    *("'", '"', "'a", '"a', "'a'", '"a b"', "'\"a\"'", "a b", "a\tb", "a\nb", "a'b", "a\\b", "\\", "\\,", "a=b", "=", "==", ":"),
    *("a:b", "a/b", "../..", "/", ".", "..", "~", "~/x", "/dev/null", "/nowhere/x", "*", "a#b", "#", "!!python/object:os", "&a"),
    *("*a", "|", ">", "%", "@", "`", "é", "日本", "\u202e", "\ufeff", "😀", "\udcff", "\\0", "\\x00", "'\\x00'", "\x00", "\x1b[31m"),
    *(LONG, f"'{LONG}'", "x" * 5000, f"{LONG}/{LONG}", "é" * 200, "a/" * 400, "s3://", "s3://b/k", "://", "file:///", "http://x"),
    *("os.path.join", "os.nope", "nope.Nope", "builtins.int", "a.b.c.d", ".a", "a.", "1a", "os", "titan_exp.models.llama.model"),
)  # fmt: skip
HYDRA = (
    *("hydra.verbose=true", "hydra.verbose=titan_exp", "hydra.verbose=[a,b]", "hydra.verbose=1", "hydra.verbose={a:1}"),
    *("hydra.verbose=null", "hydra/launcher=basic", "hydra/launcher=submitit_local", "hydra/launcher=nope"),
    *("hydra/sweeper=basic", "hydra/sweeper=nope", "hydra/job_logging=default", "hydra/job_logging=nope"),
    *("hydra/job_logging=disabled", "hydra/hydra_logging=colorlog", "hydra/help=nope", "hydra/output=x", "hydra/env=x"),
    *("hydra.run.dir=made", "hydra.run.dir=null", "hydra.run.dir=[a]", "hydra.run.dir=${now:%Y}", f"hydra.run.dir={LONG}"),
    *("hydra.run.dir=${nope}", "hydra.run.dir=", "hydra.sweep.dir=made", "hydra.sweep.subdir=${hydra.job.num}", "hydra.run=1"),
    *("hydra.output_subdir=.hydra", "hydra.output_subdir=null", "hydra.output_subdir=[1]", "hydra.output_subdir=a/../.."),
    *("hydra.job.name=x", "hydra.job.name=null", "hydra.job.chdir=true", "hydra.job.chdir=null", "hydra.job.nope=1"),
    *("hydra.job.env_set={FUZZ:1}", "hydra.job.env_set.FUZZ=[1]", "hydra.job.env_copy=[HOME,NOPE]", "hydra.job.config=1"),
    *("hydra.mode=MULTIRUN", "hydra.mode=RUN", "hydra.mode=nope", "hydra.mode=null", "hydra.callbacks={a:1}"),
    *("+hydra.callbacks.x={_target_:os.getcwd}", "hydra.searchpath=[]", "hydra.searchpath=null", "hydra.searchpath=x"),
    *("hydra.searchpath=[x]", "hydra.searchpath=[file://nowhere]", "hydra.searchpath=[pkg://nope]", "hydra.searchpath=[1]"),
    *("hydra.searchpath=[pkg://os.path]", "hydra.searchpath=[pkg://hydra.test_utils]", "hydra.searchpath={a:1}"),
    *("hydra.sweeper.params=1", "hydra.sweeper.nope=1", "+hydra.sweeper.params={optimizer.lr:'1,2'}", "hydra.launcher.n=1"),
    *("hydra.help.template=${nope}", "hydra.help=1", "hydra.nope=1", "+hydra.nope=1", "~hydra", "hydra=1", "hydra=null"),
    *("hydra={}", "~hydra.run", "~hydra/job_logging", "~hydra/sweeper", "hydra.runtime.choices.model=x", "hydra.overrides.task=[1]"),
    *("hydra.runtime.choices=null", "hydra.overrides=1", "hydra/=x", "hydra/nope=x", "/hydra=x", "hydra.job.override_dirname=x"),
    *("hydra.job_logging.root.level=nope", "+hydra.job_logging={version:2}", "+hydra.hydra_logging={version:9}"),
)  # fmt: skip
"""Overrides of Hydra's own node."""

JUNK = (
    *("", " ", "=", "==", "+", "++", "~", "+=", "~=", "+=1", "a", "a.b", "training.steps", "training.steps:100", "steps", "-"),
    *("training .steps=1", "training.steps =1", "training.steps= 1", "training.steps", "=1", ".=1", "..=1", ".a=1", "a.=1"),
    *("training..steps=1", "training.=1", "training.steps.x=1", "training[steps]=1", "training.steps[0]=1", "optimizer.betas.0=1"),
    *("optimizer.betas[0]=1", "training=1", "training=null", "training=[]", "training={}", "training={steps:3}", "model={}"),
    *("training={steps:3,nope:1}", "+training={a:1}", "~training", "~training.steps", "~training.nope", "~nope", "~model=x"),
    *("~model=llama_laptop", "~optimizer", "~experiment", "~paths", "~paths.runs", "~training.steps=5", "model@x=llama_debug"),
    *("+model@x=llama_debug", "model@x:y=llama_debug", "model@:y=llama_debug", "model@_global_=llama_debug", "local@_global_=x"),
    *("+model@model2=qwen3_debug", "optimizer@training=adamw", "+optimizer@training.x=adamw", "model@=x", "@=x", "a@b@c=1"),
    *("model/family=llama3", "+model/family=llama3", "model/=x", "/model=llama_debug", "model//x=1", "+model/family@model=qwen3"),
    *("_self_=1", "defaults=[]", "+defaults=[]", "defaults=[model]", "config=1", "+config=1", "_target_=x", "+_target_=x"),
    *("+training.x=1", "++training.steps=1", "++training.nope=1", "+training.steps=1", "++model=llama_debug", "++nope.a.b=1"),
    *("+nope=1", "+a.b.c=1", "+data.options.x=1", "++data.options={a:1}", "+model.options.x=${nope}", "data.options.x=1"),
    *("+experiment=smoke", "+experiment=[smoke]", "+experiment=smoke,nope", "+experiment=[smoke,llama3_8b_c4]", "experiment=smoke"),
    *("+experiment=null", "+experiment=[]", "+experiment={a:1}", "+experiment=1", "+experiment/x=y", "+experiment@x=smoke"),
    *("models=llama_debug", "model.name", "optimizers.lr=1", "TRAINING.STEPS=1", "training-steps=1", "--", "---", "-x", "--x=1"),
    *("training.steps==1", "training.steps=1=2", "'training.steps=1'", '"training.steps=1"', "training.steps='1'", "$HOME=1"),
    *(f"{LONG}=1", f"training.{LONG}=1", f"+{LONG}=1", f"+training.{LONG}=1", f"{LONG}", "é=1", "日本.語=1", "\udcff=1", "a\nb=1"),
    *("a b=1", "a,b=1", "[a]=1", "{a}=1", "${a}=1", "${training.steps}=1", "+${a}=1", "a:b=1", "1=1", "null=1", "true=1", "+1=1"),
    *("+null=1", "+true=x", "a*=1", "#=1", "#", "a#b", "%=1", "!a=1", "experiment.name=", "paths.runs=", "paths.runs=null"),
    *("paths.runs=afile", "paths.runs=afile/x", "paths.runs=other", "paths.runs='a b'", "paths.runs=~nobody/x", "paths=runs"),
)  # fmt: skip
"""Overrides and words that are wrong as a whole."""

FLAGS = (
    *("--help", "-h", "--resolve", "--multirun", "-m", "--dry-run", "--skip", "--jobs=2", "--jobs", "--jobs=x", "--prune"),
    *("--yes", "--run", "-r", "--version", "--hydra-help", "--dryrun", "--steps", "--training.steps=1", "--lr", "-n", "-1"),
    *("--cfg", "--cfg=nope", "-c=job", "--package=training", "--package=nope", "-p", "--info", "--info=nope", "-i", "-sc"),
    *("--config-path=mine", "--config-path=nope", "--config-path=afile", "--config-path=", "--config-name=nope"),
    *("--config-name=../x", "--config-dir=mine", "--config-dir=nope", "--config-dir=afile", "--config-dir=", "-cd"),
    *("--config-path=pkg://nope", "--config-path=pkg://titan_exp", "--config-name=", f"--config-name={LONG}"),
    *("--experimental-rerun=nope", "--experimental-rerun=afile", "--shell-completion", "--json", "--device=h100"),
    *("--device=nope", "--ranks=0", "--ranks=9", "--ranks=a", "--html", "--full", "--gpus=8", "--gpus=0", "--tokens=1e9"),
    *("--limit=0", "--global-batch-size=8", "--rank=0", "--attempt=9", "-f=1", "--watch=no", "--json=x", "--format=x"),
)  # fmt: skip
"""Flags of all verbs, right and wrong."""

OPTIONS = (
    *("step=0", "step=3", "step=-1", "step=x", "tokens=0", "tokens=4", "temperature=-1", "temperature=x", "top_p=2", "top_k=x"),
    *("prompt=hi", "prompt=", "prompts=nope", "prompts=afile", "prompts=folder", "seed=-1", "cache=maybe", "dtype=fp8", "tp=0"),
    *("runs=nope", "run=nope", "run=afile", "run=folder", "format=nope", "format=torch", "dtype=bf16", "file_gb=0", "source=x"),
    *("target=out", "split=all", "split=nope", "json=true", "out=store", "out=afile", "out=", "workers=-1", "parts=0"),
    *("shard_tokens=x", "shuffle=-1", "check=nope", "check=folder", "check=afile", "metrics=loss", "metrics=nope", "metrics=,"),
    *("at=least", "at=x", "at=-1", "at=1e9", "at=2.5B", "baseline=nope", "target=x", "target=nan", "html=none", "html=folder"),
    *("html=afile/x.html", f"html={LONG}", "csv=true", "csv=out.csv", "csv=folder", "json=false", "latex=1", "markdown=no"),
    *("from_wandb=x", "from_wandb=a/b/c", "group=x", "to_wandb=x", "size=laptop", "size=nope", "size=", "paths.runs=nope"),
    *("paths.runs=runs", "repo=x", "files=nope", "revision=x", "limit=1", "gpus=8", "device=h100", "ranks=0", "rank=0"),
)  # fmt: skip
"""Options of the verbs that are not keys."""

NAMES = (
    *("first", "study", "nope", "first/", "first/nope", "runs", "runs/first", ".", "..", "/", "", "afile", "folder", "~", "*", "runs/*"),
    *("runs/*/*", "[", "runs/[", "abc", "0", "first study", "FIRST", "frist", "é", "\udcff", LONG, f"runs/{LONG}", "a\nb", "${x}"),
    *("s3://bucket/run", "://", "http://x/y", "file.pt", "nope.pt", "afile.yaml", "optimizers", "step=3", "first,study", "-"),
    *("damaged", "damaged/empty", "damaged/yaml", "damaged/state", "damaged/bytes", "damaged/folder", "damaged/lines"),
)  # fmt: skip
"""Names of runs, studies, files and folders."""

BROKEN_YAML = (
    *("", " ", "\n\n", "#\n", "[1", "{", "a: [1\n", "\tlr: 1\n", "lr: 1\n\tx: 2\n", "- 1\n- 2\n", "text", "42", "null", "'x'"),
    *("lr: 1\nlr: 2\n", "\ufefflr: 1e-5\n", "\xff\xfe", "lr: é\n", "a: &a [*a]\n", "? [1]\n: 2\n", "1: 2\n", "null: 1\n", "a: !x 1\n"),
    *("!!python/object/apply:os.getcwd []", "defaults: adamw\n", "defaults: [nope]\n", "defaults: [adamw]\n", "defaults: {}\n"),
    *("defaults: null\n", "defaults: [[1]]\n", "defaults: [{a: 1, b: 2}]\n", "defaults: [1, null]\n", "defaults: [adamw, _self_]\nlr: x\n"),
    *("defaults: [_self_, _self_]\n", "defaults: [override /model: llama_debug]\nlr: 1\n", "defaults: [broken]\n"),
    *("defaults: [override /nope: x]\n", "# @package nope\nlr: 1\n", "# @package a b\nlr: 1\n", "# @package _global_\nlr: 1\n"),
    *("# @package _global_\ndefaults: [override /optimizer: sgd]\n", "lr: ${nope}\n", "lr: ${\n", "lr: {a: 1}\n", "lr: 1\nx: 1\n"),
    *("defaults:\n  - adamw\nlr: [1]\n", "a: 1\n...\n---\nb: 2\n", "\x00", "lr: 1e-5 # \x1b\n", "a: b: c\n", "%YAML 9\n---\na: 1"),
    *("defaults: [/model: llama_debug]\n", "defaults: [model@x: y]\n", "defaults: [optional nope]\n", "defaults: ['']\n"),
)  # fmt: skip
"""Contents of damaged option files."""

BROKEN_STUDY = (
    *("question: 3\n", "question: x\naxes: 1\n", "question: x\naxes: []\n", "question: x\naxes: [1]\n", "axes:\n  - grid: 1\n"),
    *("question: x\naxes:\n  - grid: {optimizer.lr: 1}\n", "question: x\naxes:\n  - grid: {1: [2]}\n", "question: [1]\n"),
    *("question: x\naxes:\n  - grid: {optimizer.lr: [1e-3, [1], {a: 1}, null]}\n", "question: x\naxes:\n  - list: {a: 1}\n"),
    *("question: x\naxes:\n  - list: {a: [b]}\n", "question: x\naxes:\n  - list: {a: [model]}\n", "question: x\nseeds: -1\n"),
    *("question: x\naxes:\n  - grid: {training.steps: [1, 2]}\nbaseline: [1]\n", "question: x\nsizes: [1]\n"),
    *("question: x\naxes:\n  - grid: {training.steps: [1, 2]}\nbaseline: {training.steps: 1}\nmetrics: [loss]\n", "[]"),
    *("question: x\naxes:\n  - grid: {training.steps: [1, 2]}\nexclude: [1]\n", "question: x\nheld_fixed: {a: 1}\n"),
    *("question: x\naxes:\n  - grid: {training.steps: [1, 1]}\n", "question: x\nheld_fixed: ['a b', '=', '${x}=1']\n"),
    *("question: x\naxes:\n  - zip: {training.steps: [1, 2], optimizer.lr: [1]}\n", "{? [1] : 2}", "{[1]: 2, {a: 1}: 3}"),
    *("question: x\naxes:\n  - grid: {nope: [1, 2]}\n", "question: x\naxes:\n  - grid: {model: [nope, llama_debug]}\n"),
    *("question: x\naxes:\n  - grid: {training.steps: ['${nope}', '1,2', 'range(3)']}\n", "question: x\nseeds: 1.5\n"),
    *("question: x\naxes:\n  - {grid: {training.steps: [1]}, when: 3}\n", "question: x\nseeds: 99999999999\naxes: 1\n"),
    *("question: x\naxes:\n  - {grid: {training.steps: [1]}, when: {nope: 1}, name: y}\n", "question: x\nmetrics: {1: 2}\n"),
    *("question: x\naxes:\n  - grid: {training.steps: [1]}\nheld_fixed: [hydra.verbose=true, model=[a]]\n", "? {a: 1}\n"),
)  # fmt: skip
"""Contents of damaged studies."""

VERBS = {
    "train": 10,
    "plan": 3,
    "plan search": 2,
    "plan calibrate": 1,
    "sweep": 4,
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
    return {str(path.relative_to(CONF_DIR)): sorted(file.stem for file in path.glob("*.yaml")) for path in folders}


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
        # Sweeps are planned; a point that is started would start for good.
        sweeps = verb == "sweep" or {"-m", "--multirun"} & set(words) or "MULTIRUN" in " ".join(words)
        return [*verb.split(), *words, *(["--dry-run"] if sweeps else [])]

    def _head(self, verb: str) -> list[str]:
        """Words without which most lines of a verb end at once."""
        rng, pick = self.rng, self.rng.choice
        if verb == "train":
            views = (["--cfg", "job"], ["--cfg", "job", "--resolve"], ["--cfg", "all"], ["--cfg", "hydra"], ["--info", "defaults"])
            return pick((*views, [], [], [], ["-m"], ["-m", "--skip"], ["--help"], ["data.preview=1"]))
        if verb == "sweep":
            return [pick((*_studies(), *_studies(), self._study_file(), pick(NAMES)))]
        if verb == "tokenize":
            return ["out=store", "data=text"] if rng.random() < 0.5 else []
        if verb in ("plan", "plan search"):
            return pick(([], ["cluster=slurm_h100"], ["model=llama_debug"], ["cluster=slurm_h100", "model=llama3_8b"]))
        if verb in ("", "help"):
            return [pick((*NAMES, "trian", "plans", "checkpoints", "--version", "-sc", "model=llama_debug"))]
        return [pick(NAMES) for _ in range(pick((0, 1, 1, 2)))]

    def _word(self, verb: str) -> str:
        takes_overrides = verb in ("train", "plan", "plan search", "sweep", "tokenize", "evaluate", "retry")
        common: tuple[Callable[[], str], ...] = (self._value, self._value, self._value, self._group, self._mutated)
        rare: tuple[Callable[[], str], ...] = (
            lambda: self.rng.choice(JUNK),
            lambda: self.rng.choice(HYDRA),
            lambda: self.rng.choice(FLAGS),
            lambda: self.rng.choice(OPTIONS),
            self._own_file,
        )
        other: tuple[Callable[[], str], ...] = (
            lambda: self.rng.choice(OPTIONS),
            lambda: self.rng.choice(FLAGS),
            lambda: self.rng.choice(NAMES),
            lambda: self.rng.choice(JUNK),
        )
        return self.rng.choice((*common, *rare) if takes_overrides else (*other, self._value))()

    def _value(self) -> str:
        """Override of a real key; one of four values is right for its type."""
        rng = self.rng
        key = rng.choice(value_keys() if rng.random() < 0.9 else keys())
        choices = choices_of(annotation_of(key)) or ["1"]
        value = rng.choice(choices) if rng.random() < 0.25 else rng.choice(VALUES)
        prefix = rng.choice(("", "", "", "", "", "", "+", "++", "~"))
        return f"{prefix}{key}" if prefix == "~" and rng.random() < 0.5 else f"{prefix}{key}={value}"

    def _group(self) -> str:
        """Choice of a group, right or wrong."""
        rng = self.rng
        group = rng.choice(list(options_by_group()))
        options = options_by_group()[group] or ["x"]
        package = rng.choice(("", "", "", "", "@x", "@_global_", f"@{group}", "@x:y", "@:"))
        one, other = rng.choice(options), rng.choice(options)
        forms = (one, one, one, one, f"[{one}]", f"[{one},{other}]", f"{one},{other}", f"{{{one}:1}}", f"{one}.yaml", f"/{one}")
        value = rng.choice((*forms, "null", "[]", "[null]", "glob(*)", "", "nope", "1", "${model}", "[[a]]", rng.choice(VALUES)))
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
        self._write(path, rng.choice(BROKEN_YAML))
        return rng.choice((f"{group}=broken", f"+{group}=broken", f"{group}=[broken]"))

    def _study_file(self) -> str:
        rng = self.rng
        path = Path("sweeps") / "broken.yaml"
        text = rng.choice((*BROKEN_STUDY, *BROKEN_YAML))
        if rng.random() < 0.4:
            text = self._damaged(Path(SWEEPS_DIR / f"{rng.choice(_studies())}.yaml").read_text())
        self._write(path, text)
        return rng.choice((str(path), "broken"))

    def _damaged(self, text: str) -> str:
        lines = text.splitlines()
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            place = self.rng.randrange(len(lines))
            change: Sequence[str] = self.rng.choice(([], [lines[place]] * 2, ["\t" + lines[place]], [lines[place][1:]], ["  " + lines[place]], [lines[place] + self.rng.choice(":[]{},'")]))  # fmt: skip
            lines[place : place + 1] = change
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
