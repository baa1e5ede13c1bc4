"""Rounds of a ladder: points at every size and length, trunks before their branches, and what they cost."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache

from titan_exp.config.devices import device_type
from titan_exp.config.errors.user_error import UserError, listed
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.study import ladder as laws
from titan_exp.config.study.labels import split_override
from titan_exp.config.study.ladder import Ladder, LadderRung
from titan_exp.config.study.points import Point, last_wins
from titan_exp.config.study.study import Study
from titan_exp.launch.sweep.rounds import Finished, Rounds
from titan_exp.launch.sweep.sweep_plan import PlannedPoint, SweepPlan
from titan_exp.models.spec.lookup import family_violations, model_spec
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.transformer import WIDTHS
from titan_exp.plan.gate import check_memory
from titan_exp.tracking.display import format_count, format_duration, format_items

Compose = Callable[[Point], Experiment]
TOLERANCE = 0.1  # share by which a size may differ from the parameters that were asked for
NOTHING = "(nothing varies)"
PARENT = "checkpoint.continue_from"
RUNG = "rung"  # column of a comparison that stands for all keys of a size and a length


class Shapes:
    """Shapes of a model at other sizes. `compose` composes it with further overrides."""

    def __init__(self, ladder: Ladder, compose: Callable[[tuple[str, ...]], Experiment], path: str) -> None:
        self.ladder, self._compose, self._path = ladder, cache(compose), path
        self.base = compose(())
        self._width = {key: value for key in ladder.width or WIDTHS if (value := self._value(key)) or ladder.width}
        self._depth = {key: self._value(key) for key in ladder.depth}
        for name, found in {"width": self._width, "depth": self._depth}.items():
            if missing := [key for key, value in found.items() if not value]:
                here = [key for key in WIDTHS if self._value(key)] if name == "width" else []
                what = f"ladder.{name}: model.{missing[0]} is not a whole number of this model"
                raise UserError(f"{path}: {what}. Use {name}: [{', '.join(here)}]")

    def at_multiple(self, multiple: Fraction, depth: Fraction | None = None) -> list[str]:
        """Overrides of a size; its depth may be another multiple. Raises UserError if the family cannot have it."""
        if reason := self._misfit(multiple):
            unit = math.gcd(*self._width.values())
            most = math.ceil(max(self.ladder.multiples or (multiple,)) * unit) + 2 * unit
            allowed = [each for j in range(1, min(most, 256) + 1) if not self._misfit(each := Fraction(j, unit))]
            remedy = (
                laws.nearest_multiples(self.ladder.multiples or (multiple,), allowed) if allowed else "another width"
            )
            raise UserError(f"{self._path}: ladder.multiples: {multiple} of this model: {reason}. Use {remedy}")
        depth = depth or multiple
        return [*self._wide(multiple), *(f"model.{key}={max(1, round(v * depth))}" for key, v in self._depth.items())]

    def nearest(self, parameters: float) -> tuple[Fraction, Fraction]:
        """Multiples of width and depth of the shape most like the model, within a tenth of a number of parameters.
        Raises UserError if there is none."""
        unit, found = math.gcd(*self._width.values()), list[tuple[float, Fraction, Fraction, int]]()
        layers = next(iter(self._depth.values()), 1)
        for j in range(1, 8 * unit + 1):
            if self._misfit(width := Fraction(j, unit)):
                continue
            depth = Fraction(1)
            if self._depth:  # parameters are linear in the depth
                one, two = (self.count(self.at_multiple(width, Fraction(n, layers))) for n in (1, 2))
                depth = Fraction(max(1, round(1 + (parameters - one) / (two - one))), layers)
            count = self.count(self.at_multiple(width, depth))
            found.append((abs(math.log(width / depth)), width, depth, count))
            if count > 2 * parameters:
                break
        if near := [shape for shape in found if abs(shape[-1] / parameters - 1) <= TOLERANCE]:
            return min(near)[1:3]
        counts = sorted((shape[-1] for shape in found), key=lambda count: abs(count - parameters))[:3]
        wanted = f"{format_count(parameters)} non-embedding parameters, within {TOLERANCE:.0%}"
        what = f"ladder.parameters: no shape of this model has {wanted}"
        raise UserError(f"{self._path}: {what}. Use {listed(sorted(counts))} instead")

    def count(self, overrides: Sequence[str]) -> int:
        """Non-embedding parameters."""
        return self.spec(overrides).non_embedding_parameters

    def spec(self, overrides: Sequence[str]) -> ModelSpec:
        """Spec of the model with overrides. Raises UserError if its class has none."""
        model = self._compose(tuple(overrides)).model
        if (found := model_spec(model)) is None:
            what = f"model.architecture={model.architecture} has no spec, so that a ladder cannot count its parameters"
            raise UserError(f"{self._path}: {what}. Give its module a spec(config), or use a built-in family.")
        return found

    def _wide(self, multiple: Fraction) -> list[str]:
        return [f"model.{key}={value * multiple}" for key, value in self._width.items()]

    def _misfit(self, multiple: Fraction) -> str:
        odd = {key: value for key, value in self._width.items() if value % multiple.denominator}
        if broken := [f"model.{key}={value} gives {float(value * multiple):g}" for key, value in odd.items()]:
            return f"{listed(broken, 'and')}, which is not a whole number"
        found = next(family_violations(self._compose(tuple(self._wide(multiple))).model), None)
        return "" if found is None else f"{found.field}={found.value}: {found.reason}"

    def _value(self, key: str) -> int:
        """Value of a key of the model; 0 if it has no such whole number."""
        value = self.base.model
        for name in key.split("."):
            value = getattr(value, name, None)
        return value if isinstance(value, int) else 0


class LadderRounds(Rounds):
    """One round of all runs, or with branches a round of trunks and one of the shorter runs that branch off them.

    `arms` are the points of the study at the model's own size. A rung has the baseline's parameters, tokens, batch and
    rate. Raises UserError if the model cannot have a size, or the study sets what the ladder sets.
    """

    def __init__(self, study: Study, arms: Sequence[Point], baseline: str | None, compose: Compose) -> None:
        assert study.ladder is not None
        self.ladder, self.path, self.metric = study.ladder, str(study.path), study.ladder.metric or ""
        self.better = study.better(self.metric) or "min"
        arms = [point for point in arms if point.excluded is None]
        first = {point.variant: point for point in reversed(arms)}
        self.baseline = baseline or arms[0].variant
        self.arm = "" if self.baseline == NOTHING else self.baseline
        self._require(first, compose(first[self.baseline]))

        def with_more(point: Point) -> Callable[[tuple[str, ...]], Experiment]:
            return lambda more: compose(replace(point, overrides=last_wins([*point.overrides, *more])))

        shapes = {variant: Shapes(self.ladder, with_more(point), self.path) for variant, point in first.items()}
        rungs = list(self._rungs(shapes))
        self.all = [_at(point, *rung[point.variant]) for rung in rungs for point in arms]
        """Points of all rounds; branches without their parent."""
        self.row = _at(first[self.baseline], *rungs[-len(self.ladder.tokens_per_parameter)][self.baseline]).variant
        """Longest run of the baseline at the largest size."""
        set_keys = [split_override(text)[0] for rung in rungs for _, texts in rung.values() for text in texts]
        self.keys = tuple(dict.fromkeys(set_keys))
        super().__init__([point for point in self.all if point.round == 1])

    def points(self, finished: Sequence[Finished]) -> list[Point]:
        """After the first round, branches of all trunks that have not diverged."""
        if len(finished) != 1:
            return [] if finished else self.first
        trunks = {
            _trunk(entry.point): "/".join(path.parts[-2:])
            for entry in finished[0].plan.planned
            if math.isfinite(finished[0].values[path := entry.path])
        }
        branches = [(point, trunks.get(_trunk(point))) for point in self.all if point.round == 2]
        return [replace(point, overrides=(*point.overrides, f"{PARENT}={trunk}")) for point, trunk in branches if trunk]

    def result(self, finished: Finished) -> str:
        return f"{format_items(len(finished.plan.planned), 'run')} of the ladder have ended"

    def upcoming(self, plan: SweepPlan, finished: Sequence[Finished]) -> list[str]:
        branches = 0 if finished else sum(point.round == 2 for point in self.all)
        return [f"{format_items(branches, 'run')} branch off these where their decay begins."] if branches else []

    def cost(self, plan: SweepPlan) -> tuple[list[list[str]], list[str]]:
        planned = {(point.rung.scale, point.rung.arm): entry for entry in plan.planned if (point := entry.point).rung}
        seconds, counts = _step_seconds(planned), Counter(point.rung for point in self.all if point.rung)
        with_arm = any(rung.arm for rung in counts)
        rows, hours, flops, tokens = [], 0.0, 0.0, 0.0
        for rung, runs in counts.items():
            entry, step = planned.get((rung.scale, rung.arm)), seconds.get((rung.scale, rung.arm), math.nan)
            devices, took = 0 if entry is None else entry.plan.layout.devices, step * (rung.steps - rung.begins)
            row = [rung.scale, f"{rung.per_parameter}N", *[rung.arm] * with_arm, str(runs), f"{rung.parameters:,}"]
            row += [f"{rung.tokens:,}", f"{rung.steps:,}", f"{rung.sequences:,}", f"{rung.flops:.3g}"]
            rows.append([*row, str(devices or "-"), format_duration(took) if math.isfinite(took) else "-"])
            share = runs * (rung.steps - rung.begins) / rung.steps
            hours += runs * took * devices / 3600
            flops += share * rung.flops
            tokens += share * rung.tokens
        heads = ["size", "length", *["arm"] * with_arm, "runs", "parameters N", "tokens D", "steps", "batch", "FLOPs C"]
        trained = f"{format_items(len(self.all), 'run')}, {format_count(tokens)} tokens, {flops:.3g} FLOPs"
        line = f"This ladder costs {hours:.3g} GPU-hours: {trained}."
        if not math.isfinite(hours):
            line = f"This ladder is {trained}. The planner knows no time of a step on this device."
        return [[*heads, "devices", "time"], *rows], [line]

    def _rungs(self, shapes: Mapping[str, Shapes]) -> Iterator[dict[str, tuple[LadderRung, list[str]]]]:
        """Rung and overrides of each arm, size by size, the longest first."""
        base, ladder = shapes[self.baseline], self.ladder
        seq_len = base.base.training.seq_len
        for scale in ladder.multiples or ladder.parameters:
            name = f"multiple={scale}" if ladder.multiples else f"parameters={format_count(float(scale))}"
            multiples = (scale, None) if ladder.multiples else base.nearest(float(scale))
            of_size = {variant: each.at_multiple(*multiples) for variant, each in shapes.items()}
            parameters = base.count(of_size[self.baseline])
            specs = {variant: each.spec(of_size[variant]) for variant, each in shapes.items()}
            for number in reversed(range(len(ladder.tokens_per_parameter))):
                steps, begins, sequences, settings = self._settings(base.base, parameters, number)
                per, tokens = str(ladder.tokens_per_parameter[number]), steps * sequences * seq_len
                rung = LadderRung(name, per, "", parameters, tokens, 0.0, begins, steps, sequences)
                arms = dict[str, tuple[LadderRung, list[str]]]()
                for variant, spec in specs.items():
                    arm, flops = "" if variant == NOTHING else variant, spec.flops_per_token(seq_len)
                    arms[variant] = replace(rung, arm=arm, flops_per_token=flops), [*of_size[variant], *settings]
                yield arms

    def _settings(self, base: Experiment, parameters: int, number: int) -> tuple[int, int, int, list[str]]:
        """Steps, step of the branch, sequences and overrides of a length, the longest being the last."""
        ladder, training, schedule, optimizer = self.ladder, base.training, base.lr_schedule, base.optimizer
        per, sequences, overrides = ladder.tokens_per_parameter, training.global_batch_size, list[str]()
        warmup = None
        if ladder.rule == "olmo":
            sequences = laws.batch_sequences(laws.olmo_batch(parameters), training.seq_len)
            warmup = max(1, round(parameters / (sequences * training.seq_len)))
            overrides += [f"optimizer.lr={laws.olmo_rate(parameters):.4g}"]
        if ladder.rule == "nanochat":
            tokens = float(per[number] * parameters)
            sequences = laws.batch_sequences(laws.nanochat_batch(tokens), training.seq_len)
            rate, decay = laws.nanochat_factors(sequences * training.seq_len, tokens)
            overrides += [f"optimizer.lr={optimizer.lr * rate:.4g}"]
            overrides += [f"optimizer.weight_decay={optimizer.weight_decay * decay:.4g}"]
        overrides += [f"training.global_batch_size={sequences}"] * (ladder.rule != "none")
        share = schedule.decay_steps / max(1, training.steps)
        found = laws.lengths(
            parameters, per if ladder.branches else per[number:][:1], sequences * training.seq_len, share
        )
        steps, begins = found.steps[number if ladder.branches else 0], 0
        if ladder.branches:
            if warmup is None:
                warmup = round(schedule.warmup_steps / max(1, training.steps) * found.steps[-1])
            if warmup > found.branches[0]:
                raise UserError(
                    f"{self.path}: ladder.branches: the warm-up of {warmup} steps ends after step {found.branches[0]}, "
                    "where the shortest run branches off. Use branches: false, or a longer first length"
                )
            overrides += [f"lr_schedule.decay_steps={found.decays[number]}"]
            if number < len(per) - 1:
                begins = found.branches[number]
                overrides += [f"checkpoint.continue_step={begins}"]
            else:
                overrides += [f"checkpoint.{key}={found.interval}" for key in ("every", "keep_every")]
        overrides += [] if warmup is None else [f"lr_schedule.warmup_steps={warmup}"]
        return steps, begins, sequences, [f"training.steps={steps}", *overrides]

    def _require(self, first: Mapping[str, Point], base: Experiment) -> None:
        ladder, schedule, training = self.ladder, base.lr_schedule, base.training
        unstable = schedule.warmup_steps + schedule.decay_steps
        keys = [split_override(text)[0] for point in first.values() for text in point.overrides]
        refusal = laws.set_by_ladder(ladder, keys)
        if len(first) > 2:
            refusal = (
                f"a ladder compares a baseline with one candidate, and this study has {len(first)} points "
                f"({listed(list(first)[:4], 'and')}). Leave two, or write a study for each candidate"
            )
        elif training.batch_ramp:
            what = "training.batch_ramp changes the tokens of a step, which a ladder counts"
            refusal = f"{what}. Use training.batch_ramp=[]"
        elif ladder.rule != "none" and (name := base.parametrization.name) != "standard":
            refusal = f"rule: {ladder.rule} and parametrization={name} both scale the learning rate. Use rule: none"
        elif ladder.branches and (schedule.cycles > 1 or unstable >= training.steps - 1):
            refusal = "branches need a rate that is stable before one decay at the end. Use lr_schedule=wsd"
        elif ladder.branches and base.checkpoint.mode == "off":
            refusal = "checkpoint.mode=off: the longest runs save nothing to branch off. Use checkpoint=async"
        if refusal:
            raise UserError(f"{self.path}: {refusal}")


def _at(point: Point, rung: LadderRung, overrides: Sequence[str]) -> Point:
    variant = " ".join(filter(None, [rung.scale, f"tokens={rung.per_parameter}N", rung.arm]))
    label = variant if point.seed is None else f"{variant} seed={point.seed}"
    facts = point.facts | {RUNG: f"{rung.scale.partition('=')[2]} {rung.per_parameter}N"}
    own = last_wins([*point.overrides, *overrides])
    return Point(own, label, variant, point.seed, facts, round=2 if rung.begins else 1, rung=rung)


def _trunk(point: Point) -> tuple[str, str, int | None]:
    assert point.rung is not None
    return point.rung.scale, point.rung.arm, point.seed


def _step_seconds(planned: Mapping[tuple[str, str], PlannedPoint]) -> dict[tuple[str, str], float]:
    asked = {key: entry.plan for key, entry in planned.items() if device_type(entry.plan.experiment.cluster) == "cuda"}
    found: dict[tuple[str, str], float] = {}
    for key, plan in asked.items():
        wanted = replace(plan.experiment, plan=replace(plan.experiment.plan, predict="always"))
        (check,) = check_memory([wanted], plan.runs, lambda _: None)
        if check.prediction is not None and check.prediction.step_seconds is not None:
            found[key] = check.prediction.step_seconds
    return found
