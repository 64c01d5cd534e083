"""From a recipe and a target to everything a run needs: examples, held-out rows, draft, objective; all said aloud.

Whatever is wrong with a recipe or its rows is refused here, before the first step.  This module trains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.config import Recipe, check_options, parse_section
from paceline.data.chat import ChatFormat
from paceline.data.examples import Example, ExampleSet, build_examples, count_supervised
from paceline.data.rows import Reading, read_rows
from paceline.drafts._base import DraftConfig, DraftNetwork, DraftPlugin
from paceline.errors import ConfigError
from paceline.ops.vocab import DraftVocab
from paceline.plugins import load_plugin, plugin_names
from paceline.records import TargetFacts
from paceline.store.checkpoint import DraftInfo, load_draft
from paceline.store.fingerprint import identify_target
from paceline.store.hub import load_target
from paceline.targets._facts import facts_of
from paceline.targets.generic import Target
from paceline.training.objectives._base import Objective, ObjectiveConfig, ObjectivePlugin
from paceline.training.paths import refuse_steps
from paceline.training.plan import RunPlan, hold_out
from paceline.training.sources import target_states

Say = Callable[[str], None]
SHOWN = 5  # rows that are named when they are left out
SAMPLE = 8  # examples that say how large the target's states are


@dataclass(frozen=True, slots=True)
class Examples:
    """Training and validation examples.  is_held_out: False when validation had to use the training rows."""

    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    is_held_out: bool


@dataclass(frozen=True, slots=True)
class Job:
    """A run that can begin.  draft: with its first weights.  info: what its folder will say."""

    recipe: Recipe
    target: Target
    examples: Examples
    draft: DraftNetwork
    info: DraftInfo
    objective: Objective

    def lessons(self) -> tuple[Example, ...]:
        """The training examples with what the recipe supervises in them; validation is always by answers."""
        if self.recipe.data.supervise == "answers":
            return self.examples.train
        return tuple(example.supervise_all() for example in self.examples.train)


def recipe_target(recipe: Recipe, *, device: str) -> Target:
    """The target that a recipe names, loaded once its plug-ins are known.  Raises TargetError or ConfigError."""
    check_plugins(recipe)
    section = recipe.target
    return load_target(
        section.name,
        revision=section.revision,
        dtype=section.dtype,
        device=device,
        trust_remote_code=section.trust_remote_code,
    )


def check_plugins(recipe: Recipe) -> None:
    """Refuse, before a target is loaded, plug-ins that are not there and options that they do not have.

    What depends on the target, such as the layers that a draft may read, is for `prepare` to refuse.
    Raises ConfigError.
    """
    draft = _draft_plugin(recipe)
    check_options(draft.config, table=recipe.draft.options, source=recipe.draft.name, prefix=("draft", "options"))
    _objective(recipe)


def prepare(recipe: Recipe, *, target: Target, init_from: Path | None = None, say: Say = print) -> Job:
    """Everything that happens before the first step.

    init_from: a draft's folder whose weights and vocabulary the run starts from.
    Raises ConfigError, DataError or CheckpointError, one line each.
    """
    check_plugins(recipe)
    chat = chat_format(recipe, target)
    examples = read_examples(recipe, target=target, chat=chat, say=say)
    draft, info = _first_draft(recipe, target=target, chat=chat, examples=examples.train, init_from=init_from, say=say)
    draft.borrow(target)
    refuse_steps(draft, steps=recipe.validation.depth, key="validation.depth")
    target.set_taps(draft.taps)
    plugin, options = _objective(recipe)
    return Job(recipe, target, examples, draft, info, plugin.build(options, draft))


def chat_format(recipe: Recipe, target: Target) -> ChatFormat:
    """The target's tokenizer and template with the recipe's options."""
    if target.tokenizer is None:
        raise ConfigError(f"target {target.name} has no tokenizer; expected one in its folder")
    return ChatFormat(target.tokenizer, options=recipe.data.template_options)


def read_examples(recipe: Recipe, *, target: Target, chat: ChatFormat, say: Say) -> Examples:
    """Rows to examples; without validation files a tenth of the rows is held out, by digest."""
    if not recipe.data.train:
        raise ConfigError('data.train is empty; expected at least one file, for example train = ["rows.jsonl"]')
    built = _build(recipe, recipe.data.train, target=target, chat=chat, limit=recipe.data.max_rows, say=say)
    if recipe.data.validation:
        checked = _build(recipe, recipe.data.validation, target=target, chat=chat, limit=None, say=say)
        kept = _first_rows(checked.examples, recipe.validation.prompts)
        say(f"validation: {len(kept)} examples of {', '.join(recipe.data.validation)}")
        return Examples(built.examples, kept, True)
    held = _held_out(built.examples, at_most=recipe.validation.prompts)
    if not held:
        say(
            f"validation: {len(built.examples)} examples are too few to hold a tenth out, so the training rows "
            "themselves are used; accepted length will flatter the draft"
        )
        return Examples(built.examples, _first_rows(built.examples, recipe.validation.prompts), False)
    train = tuple(example for example in built.examples if example.digest not in held)
    validation = tuple(example for example in built.examples if example.digest in held)
    say(f"validation: data.validation is empty, so {len(validation)} of {len(built.examples)} examples are held out")
    return Examples(train, validation, True)


def describe_run(plan: RunPlan, job: Job) -> list[str]:
    """What a person should know before the first step, warnings last."""
    train, training = job.lessons(), job.recipe.training
    supervised = sum(example.num_supervised for example in train)
    lines = [
        f"run: {len(train)} examples, {sum(plan.lengths)} tokens per epoch, {supervised} of them supervised; "
        f"{plan.batches_per_epoch} batches, {plan.padding:.1%} padding",
        f"run: {plan.steps} steps, {plan.steps_per_epoch} in an epoch ({plan.steps / plan.steps_per_epoch:.2f} "
        f"epochs), {training.accumulation * plan.world} batches a step, warm-up {training.warmup_steps} steps",
    ]
    if training.warmup_steps >= plan.steps:
        lines.append(
            f"warning: the warm-up of {training.warmup_steps} steps is not shorter than the run of {plan.steps}: the "
            f"learning rate never reaches {training.learning_rate:g}; lower training.warmup_steps"
        )
    if supervised < 1000:
        lines.append(f"warning: {supervised} supervised tokens show that training works, and teach a draft nothing")
    return lines


def _build(
    recipe: Recipe, files: Sequence[str], *, target: Target, chat: ChatFormat, limit: int | None, say: Say
) -> ExampleSet:
    reading: Reading = read_rows(list(files), limit=limit)
    say(f"data: {', '.join(Path(file).name for file in files)}: {reading.summary()}")
    built = build_examples(
        reading.rows,
        chat=chat,
        max_length=recipe.data.max_length,
        vocab_size=target.vocab_size,
        answers=recipe.data.answers,
    )
    say(f"data: {built.summary()}")
    lost = [f"{skip.source}: skipped: {skip.reason}" for skip in reading.skips]
    lost += [f"{drop.source}: dropped: {drop.reason}" for drop in built.drops]
    for line in lost[:SHOWN]:
        say(f"data: {line}")
    if len(lost) > SHOWN:
        say(f"data: and {len(lost) - SHOWN} more; `paceline mask` names them all")
    return built


def draft_config(recipe: Recipe, facts: TargetFacts) -> tuple[DraftPlugin, DraftConfig]:
    """The recipe's kind of draft and its sizes for a target with these facts.  Raises ConfigError."""
    plugin = _draft_plugin(recipe)
    return plugin, plugin.configure(facts, _draft_options(recipe, plugin=plugin, facts=facts))


def objective_options(recipe: Recipe) -> ObjectiveConfig:
    """The objective's options, parsed.  Raises ConfigError."""
    return _objective(recipe)[1]


def _draft_plugin(recipe: Recipe) -> DraftPlugin:
    plugin: DraftPlugin = load_plugin("drafts", name=recipe.draft.name, kind=DraftPlugin)
    if not plugin.has_weights:
        names = plugin_names("drafts")
        others = [name for name in names if load_plugin("drafts", name=name, kind=DraftPlugin).has_weights]
        raise ConfigError(
            f"draft.name is {recipe.draft.name}, which has no weights to train; expected one of {', '.join(others)}"
        )
    return plugin


def _objective(recipe: Recipe) -> tuple[ObjectivePlugin, ObjectiveConfig]:
    """The objective's plug-in and its options, parsed."""
    plugin: ObjectivePlugin = load_plugin("training.objectives", name=recipe.objective.name, kind=ObjectivePlugin)
    table = recipe.objective.options
    return plugin, parse_section(plugin.config, table=table, source="the recipe", prefix=("objective", "options"))


def _first_rows(examples: Sequence[Example], count: int) -> tuple[Example, ...]:
    return tuple(sorted(examples, key=lambda example: example.digest)[:count])


def _held_out(examples: Sequence[Example], *, at_most: int) -> set[str]:
    """Digests of the held-out examples: all those of whole rows, chosen by the smallest digest of each row."""
    rows: dict[str, list[str]] = {}
    for example in examples:
        rows.setdefault(example.source, []).append(example.digest)
    chosen = hold_out([min(digests) for digests in rows.values()], at_most=at_most)
    return {digest for digests in rows.values() if min(digests) in chosen for digest in digests}


def _first_draft(
    recipe: Recipe,
    *,
    target: Target,
    chat: ChatFormat,
    examples: Sequence[Example],
    init_from: Path | None,
    say: Say,
) -> tuple[DraftNetwork, DraftInfo]:
    facts = facts_of(target.model, target.tokenizer)
    plugin, config = draft_config(recipe, facts)
    identity = identify_target(target)
    notes = {"max_length": recipe.data.max_length}
    if init_from is not None:
        draft = _draft_from(init_from, recipe=recipe, config=config, target=target, say=say)
        return draft, DraftInfo(recipe.draft.name, config, identity, notes)
    counts = count_supervised(examples, vocab_size=facts.vocab_size)
    size = recipe.draft.vocab_size or facts.vocab_size
    always = {token for token in (*facts.special_ids, *chat.end_ids) if token < facts.vocab_size}
    vocab = DraftVocab.from_counts(counts, size=size, always=always)
    draft = _fresh(plugin, config, vocab, seed=recipe.training.seed)
    if recipe.draft.init == "target":
        target.set_taps(draft.taps)
        draft.initialise(target.head_weight, tap_sizes=_tap_sizes(target, examples[:SAMPLE]))
    covered = int(counts[vocab.ids].sum()) / int(counts.sum())
    parameters = sum(parameter.numel() for parameter in draft.parameters())
    say(
        f"draft: {recipe.draft.name}, {parameters / 1e6:.2f} M parameters, {vocab.size} of {vocab.target_size} words "
        f"({covered:.1%} of the supervised tokens), taps {', '.join(map(str, draft.taps))}, "
        f"{'head as the target has it, fc passes the highest tap' if recipe.draft.init == 'target' else 'random start'}"
    )
    return draft, DraftInfo(recipe.draft.name, config, identity, notes)


def _tap_sizes(target: Target, examples: Sequence[Example]) -> list[float]:
    """For each tap the root mean square of a usual token: the median, since some models park huge numbers at the first.

    Rows whose states are not numbers are left out here; training names them.
    """
    taps = torch.cat([taps for taps, _ in target_states(target, examples)]).float()  # [n, K*H]
    sizes = taps.unflatten(-1, (len(target.taps), -1)).square().mean(dim=-1).sqrt()  # [n, K]
    sizes = sizes[(sizes.isfinite() & (sizes > 0)).all(dim=-1)]
    return sizes.median(dim=0).values.tolist() if len(sizes) else [1.0] * len(target.taps)


def _draft_options(recipe: Recipe, *, plugin: DraftPlugin, facts: TargetFacts) -> dict[str, object]:
    options: dict[str, object] = dict(recipe.draft.options)
    size = recipe.draft.vocab_size or facts.vocab_size
    if "draft_vocab_size" not in plugin.config.model_fields:
        return options
    if options.setdefault("draft_vocab_size", size) != size:
        raise ConfigError(
            f"draft.options.draft_vocab_size is {options['draft_vocab_size']} and draft.vocab_size {size}; "
            "expected the size once, as draft.vocab_size"
        )
    return options


def _fresh(plugin: DraftPlugin, config: DraftConfig, vocab: DraftVocab, *, seed: int) -> DraftNetwork:
    """A draft with weights that are a function of the seed; the process's own random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
        draft = plugin.build(config, vocab)
    assert isinstance(draft, DraftNetwork), "a draft with weights"
    return draft


def _draft_from(folder: Path, *, recipe: Recipe, config: DraftConfig, target: Target, say: Say) -> DraftNetwork:
    loaded = load_draft(folder, target=target, dtype=torch.float32, warn=say)
    if (loaded.info.name, loaded.info.config) != (recipe.draft.name, config):
        ours, theirs = config.model_dump(), loaded.info.config.model_dump()
        differing = [
            f"{key} {theirs.get(key)} instead of {ours.get(key)}" for key in ours if ours[key] != theirs.get(key)
        ]
        raise ConfigError(
            f"{folder} is another draft than the recipe's: {', '.join(differing) or loaded.info.name}; "
            "change the section [draft] or leave --init-from out"
        )
    say(f"draft: {recipe.draft.name} starts from {folder.name}, with its vocabulary of {loaded.draft.vocab.size} words")
    return loaded.draft.train()


def with_score(info: DraftInfo, *, step: int, supervised: int, score: float | None) -> DraftInfo:
    """The draft's facts with where it stands: steps done, supervised tokens seen, simulated accepted length."""
    notes = {**info.notes, "step": step, "supervised_tokens": supervised}
    return replace(info, notes=notes if score is None else {**notes, "accepted_length": score})
