"""One run of `paceline study`: the parts in their order, each in a process of its own, and the results written.

A part that is finished is not done again, so that the same command goes on after a kill; figures come from `measure`,
and what a part does is in `_study_work`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from paceline.cli._child import run_child
from paceline.cli._progress import Bar, interruptible
from paceline.cli._study_folder import RUN, TRAIN_LOG, StudyFolder, begin_part, end_part, finished_part, read_run
from paceline.cli._study_work import SeedBench, bench_seed, train_cell
from paceline.config import Recipe, dump_recipe
from paceline.measure.record import to_json
from paceline.measure.study import COSTS, CellResult, SeedRun, StudyResult, study_record
from paceline.measure.study_tables import study_markdown
from paceline.store.draft_facts import FACTS
from paceline.store.files import sha256_file, write_text
from paceline.store.manifest import close_manifest, open_manifest, without_folders
from paceline.training.budget import WARM_UP, equal_steps, seconds_left, step_seconds
from paceline.training.log import LOG, read_log
from paceline.training.study import Cell, Study, change_training, with_steps

BENCH = "measuring"  # under which the seconds of interleaved runs are kept; no arm's name has a space or this length


@dataclass(slots=True)
class StudyRun:
    """A study on its way.  cells: as `study_cells` gives them.  folder: taken already."""

    study: Study
    cells: list[Cell]
    folder: StudyFolder
    console: Console
    _costs: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    _waiting: list[str] = field(default_factory=list[str])
    _total: int = 0

    def run(self) -> StudyResult:
        """Do what is not done yet, and write study.json and study.md after every seed."""
        manifest = open_manifest(
            device=self.study.measure.device, dtype=self.study.measure.dtype, seed=self.study.measure.seed
        )
        trials = self._trials()
        self._waiting = [f"trial of {cell.arm}" for cell in trials]
        for seed in self.study.study.seeds:
            self._waiting += [cell.arm for cell in self._of(seed) if cell.recipe is not None]
            self._waiting += [BENCH for _ in self.study.measure.temperatures]
        self._total = len(self._waiting)
        kept = f"finished parts are kept in {self.folder.root}; the same command goes on"
        with interruptible(lambda: kept):
            for cell in trials:
                self._train(cell, self.folder.trial(cell), key=f"trial of {cell.arm}")
            runs: list[SeedRun] = []
            done: list[CellResult] = []
            for seed in self.study.study.seeds:
                cells = [self._with_equal_cost(cell) for cell in self._of(seed)]
                for cell in cells:
                    if cell.recipe is not None:
                        self._train(cell, self.folder.cell(cell), key=cell.arm)
                found = [self._bench(seed, temperature) for temperature in self.study.measure.temperatures]
                runs += found
                done += [self._cell_result(cell, found[0]) for cell in cells]
                self._write(self._result(done, runs, manifest=close_manifest(manifest).as_dict()))
        return self._result(done, runs, manifest=close_manifest(manifest).as_dict())

    def _write(self, result: StudyResult) -> None:
        record = study_record(result)
        write_text(self.folder.root / "study.json", to_json(record))
        write_text(self.folder.root / "study.md", study_markdown(record))

    def _of(self, seed: int) -> list[Cell]:
        return [cell for cell in self.cells if cell.seed == seed]

    def _trials(self) -> list[Cell]:
        """The short runs by which steps are made to cost the same: the baseline's and one for each arm that asks."""
        first = self._of(self.study.study.seeds[0])
        asking = [cell for cell in first[1:] if cell.recipe is not None and cell.equal == "seconds"]
        return [self._trial_of(cell) for cell in [*first[:1], *asking]] if asking else []

    def _trial_of(self, cell: Cell) -> Cell:
        steps = WARM_UP + self.study.budget.trial_steps
        short = with_steps(cell, steps)
        assert short.recipe is not None
        changes = {"log_every": 1, "save_every": steps, "validate_every": steps}
        return Cell(cell.arm, cell.seed, change_training(short.recipe, changes), cell.start, None, cell.equal)

    def _with_equal_cost(self, cell: Cell) -> Cell:
        """The cell with as many steps as take the baseline's seconds, where it is asked for that."""
        if cell.recipe is None or cell.equal == "tokens" or cell.arm == self.study.study.baseline:
            return cell
        baseline = self._of(cell.seed)[0]
        assert baseline.recipe is not None and baseline.recipe.training.steps is not None, "study_cells has refused it"
        one, own = (step_seconds(read_log(self.folder.trial(each) / RUN / LOG)) for each in (baseline, cell))
        steps = equal_steps(baseline.recipe.training.steps, baseline=one, own=own)
        self.console.print(
            f"{cell.name}: a step takes {own:.3g} s, the baseline's {one:.3g} s: {steps} steps instead of "
            f"{baseline.recipe.training.steps}"
        )
        return with_steps(cell, steps)

    def _train(self, cell: Cell, folder: Path, *, key: str) -> None:
        assert cell.recipe is not None
        self._waiting.remove(key)
        costs = begin_part(folder, recipe=cell.recipe, start=cell.start)
        if costs is None:
            label = key if key != cell.arm else f"training {cell.arm}, seed {cell.seed}"
            arguments = (dump_recipe(cell.recipe), str(folder / RUN), cell.start)
            self._do(label, key, train_cell, arguments, log=folder / TRAIN_LOG)
            costs = end_part(folder)
        self._costs.setdefault(key, []).append(costs.seconds)

    def _bench(self, seed: int, temperature: float) -> SeedRun:
        self._waiting.remove(BENCH)
        drafts = {cell.arm: self.folder.draft(cell, weights=self.study.study.weights) for cell in self._of(seed)}
        prints = {arm: sha256_file(path / FACTS) for arm, path in drafts.items()}
        out = self.folder.bench(self.study, seed=seed, temperature=temperature, drafts=prints)
        if not out.is_file():
            recipe = self._recipe
            job = SeedBench(
                target=recipe.target, drafts={arm: str(path) for arm, path in drafts.items()},
                measure=self.study.measure, temperature=temperature, seed=seed,
                template=dict(recipe.data.template_options), out=out,
            )  # fmt: skip
            out.parent.mkdir(parents=True, exist_ok=True)
            label = f"measuring seed {seed}, temperature {temperature:g}"
            self._do(label, BENCH, bench_seed, (job,), log=out.with_suffix(".log"))
        run = read_run(out, seed=seed, temperature=temperature)
        walls = [call.wall for each in run.observations for call in each.results.values()]
        self._costs.setdefault(BENCH, []).append(sum(walls))
        return run

    @property
    def _recipe(self) -> Recipe:
        """Of the first arm that is trained: the target is the same for all."""
        return next(cell.recipe for cell in self.cells if cell.recipe is not None)

    def _do(self, label: str, key: str, work: Callable[..., None], arguments: tuple[Any, ...], *, log: Path) -> None:
        """A part in a process of its own, with a bar."""
        left = seconds_left(self._costs, [key, *self._waiting])
        about = "" if left is None else f"; about {duration(left)} left in all"
        number = self._total - len(self._waiting)
        self.console.print(Text(f"part {number} of {self._total}: {label}{about}"))
        with ExitStack() as stack:
            bars: list[Bar] = []

            def hear(done: int, total: int, figures: str) -> None:
                if not bars:  # only the child knows how much there is
                    bars.append(stack.enter_context(Bar(self.console, total=total, text=label, done=done - 1)))
                bars[0].update(done, f"{label}: {figures}")

            run_child(work, arguments, log=log, hear=hear)

    def _cell_result(self, cell: Cell, run: SeedRun) -> CellResult:
        costs = finished_part(self.folder.cell(cell)) if cell.recipe is not None else None
        values = {} if costs is None else {name: value for name, value in asdict(costs).items() if name in COSTS}
        return CellResult(cell.arm, cell.seed, cell.equal, values, run.conditions["draft"][cell.arm])

    def _result(self, cells: list[CellResult], runs: list[SeedRun], *, manifest: dict[str, Any]) -> StudyResult:
        study = self.study
        arms = list(dict.fromkeys(cell.arm for cell in self.cells))
        conditions = {key: value for key, value in runs[0].conditions.items() if key not in ("draft", "decoders")}
        about = {
            "recipe": without_folders(study.study.recipe),
            "set": list(study.study.set),
            "warm_start": None if study.study.warm_start is None else without_folders(study.study.warm_start),
            "weights": study.study.weights,
            "budget": study.budget.model_dump(mode="json"),
            "arms": {arm.name: arm.model_dump(mode="json", exclude={"name", "draft"}) for arm in study.arms},
        }
        return StudyResult(
            name=study.study.name, baseline=study.study.baseline, arms=arms, plans=study.measure.plans, cells=cells,
            runs=runs, about=about, manifest={**manifest, **conditions},
        )  # fmt: skip


def duration(seconds: float) -> str:
    """As a person says it: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
