"""What `paceline bench` opens before it measures: target, draft, decoders, and the conditions that a record states.

It turns names of the command line into objects; it measures nothing and prints nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.cli import _opening
from paceline.cli._opening import WEIGHTLESS
from paceline.cli._outputs import check_record_path
from paceline.cli._plans import file_part, parse_plan
from paceline.decoding.binding import Draft
from paceline.drafts._base import DraftNetwork
from paceline.errors import ConfigError
from paceline.measure.bench import Bench, Protocol
from paceline.measure.ledger import replaceable, side_file
from paceline.measure.plots import require_matplotlib
from paceline.measure.systems import Sampling, System, baseline_system, check_names, draft_system, plain_system
from paceline.measure.workloads import Workload, combined_digest, ids_digest
from paceline.store.checkpoint import load_draft, weights_sha256
from paceline.store.fingerprint import identify_target
from paceline.store.hub import load_model, load_tokenizer
from paceline.store.manifest import without_folders
from paceline.targets.generic import Target

DEFAULT_PLAN = "chain:5"


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """How a target is loaded; see `store.hub.load_model`.  compile: auto or off."""

    name: str
    revision: str | None
    dtype: str
    device: str
    compile: str
    trust_remote_code: bool


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Which prompts, and how the target is served them.

    files: paths, or addresses of Hub sets.  turns: first or all.  template: KEY=VALUE pairs.
    """

    files: tuple[str, ...]
    per_file: int
    turns: str
    thinking: bool | None
    template: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """What is compared.  plans: as spelled.  baselines: names with commas between."""

    draft: str
    plans: tuple[str, ...]
    baselines: str
    assistant: str | None


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """All options of `paceline bench`, as its help explains them."""

    target: TargetOptions
    prompts: PromptOptions
    decoders: DecoderOptions
    max_new_tokens: int
    temperature: float
    top_p: float | None
    seed: int
    warmup: int
    threads: int | None
    outs: tuple[Path, ...]
    plots: Path | None
    resume: bool
    force: bool

    @property
    def protocol(self) -> Protocol:
        """How the run is made.  Raises ConfigError for options that exclude each other."""
        sampling = Sampling(self.max_new_tokens, self.temperature, self.top_p)
        return Protocol(sampling, self.prompts.turns == "all", self.warmup, self.seed)

    def check(self) -> None:
        """Raises ConfigError for a word or a draft that is not known and for a picture that could not be drawn."""
        for option, value, known in (
            ("turns", self.prompts.turns, ("first", "all")),
            ("compile", self.target.compile, ("auto", "off")),
        ):
            if value not in known:
                raise ConfigError(f"--{option}: found '{value}', expected {' or '.join(known)}")
        for plan in self.decoders.plans:
            parse_plan(plan)
        _opening.check_draft(self.decoders.draft)
        if self.plots is not None:
            require_matplotlib()


@dataclass(frozen=True, slots=True)
class OpenedDraft:
    """A draft and what a record says of it; None for plain decoding."""

    draft: Draft | None
    about: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Decoders:
    """The decoders of a run, the plain one first, then one per plan, then the baselines."""

    plain: System
    drafted: tuple[System, ...]
    baselines: tuple[System, ...]

    @property
    def all(self) -> tuple[System, ...]:
        """In the order in which the first prompt meets them."""
        return (self.plain, *self.drafted, *self.baselines)


def open_target(options: TargetOptions) -> Target:
    """Load the target.  Raises TargetError."""
    model = load_model(
        options.name, revision=options.revision, dtype=options.dtype, device=options.device,
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip
    tokenizer = load_tokenizer(options.name, revision=options.revision, trust_remote_code=options.trust_remote_code)
    return Target(model, tokenizer=tokenizer, name=options.name, compile="off" if options.compile == "off" else "auto")


def open_draft(name: str, target: Target, *, warn: Callable[[str], None]) -> OpenedDraft:
    """A draft folder, a draft without weights by its name, or `none`.  Raises CheckpointError, ConfigError."""
    if name == _opening.NO_DRAFT or name in WEIGHTLESS:
        draft = _opening.open_draft(name, target=target)
        return OpenedDraft(draft, None if draft is None else {"name": name, "kind": name, "fingerprint": "no weights"})
    loaded = load_draft(name, target=target, warn=warn)
    about = {
        "name": without_folders(name),
        "kind": loaded.info.name,
        "fingerprint": weights_sha256(loaded.draft),
        "num_parameters": sum(parameter.numel() for parameter in loaded.draft.parameters()),
        "vocab_size": loaded.draft.vocab.size,
        "trained_for": {"name": loaded.info.target.name, "fingerprint": loaded.info.target.digest},
        "training": dict(loaded.info.notes),
    }
    return OpenedDraft(loaded.draft, about)


def open_decoders(target: Target, draft: Draft | None, *, options: DecoderOptions, protocol: Protocol) -> Decoders:
    """Every decoder of the run.  Raises ConfigError."""
    plans, assistant = options.plans, options.assistant
    if draft is None and plans:
        raise ConfigError(f"--plan {plans[0]} needs a draft; leave it out or give --draft")
    names = [name.strip() for name in options.baselines.split(",") if name.strip()]
    if assistant is not None and "hf-assisted" not in names:
        raise ConfigError("--assistant is for --baseline hf-assisted; add it or leave --assistant out")
    sampling = protocol.sampling
    chosen = [parse_plan(text) for text in plans or (DEFAULT_PLAN,)]
    helper = load_model(assistant, device=str(target.device)) if assistant is not None else None
    decoders = Decoders(
        plain=plain_system(target, sampling=sampling),
        drafted=tuple(draft_system(target, draft, plan=plan, sampling=sampling) for plan in chosen) if draft else (),
        baselines=tuple(baseline_system(name, target, sampling=sampling, assistant=helper) for name in names),
    )
    check_names(decoders.all)
    return decoders


def record_paths(options: BenchOptions) -> list[Path]:
    """One path per plan: as given, or the one given and, for further plans, the plan in its name.

    Raises ConfigError when several are given and not one for each plan, and for one that may not or cannot be written.
    """
    outs, plans = options.outs, options.decoders.plans
    given_up = replaceable(outs[0]) if options.resume else frozenset[Path]()
    number = max(len(plans), 1)
    if len(outs) not in (1, number):
        raise ConfigError(f"found {len(outs)} --out and {number} --plan; give one --out, or one for each plan")
    first, paths = outs[0], list(outs)
    if len(outs) < number:
        paths += [first.with_name(f"{first.stem}-{file_part(plan)}{first.suffix}") for plan in plans[1:]]
    for place, path in enumerate(paths):
        check_record_path(path, may_replace=options.force or path.resolve() in given_up)
        if path.resolve() == side_file(first).resolve():
            raise ConfigError(f"--out: {path} is where the measurements of {first} are kept; choose another --out")
        if path.resolve() in (other.resolve() for other in paths[:place]):
            raise ConfigError(f"found two records named {path}; expected another --out for each --plan")
    return paths


def template_options(pairs: Sequence[str], *, thinking: bool | None) -> dict[str, Any]:
    """Options of the chat template from KEY=VALUE pairs; a value that is JSON is read as such.  Raises ConfigError."""
    options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"--template: found '{pair}', expected KEY=VALUE, such as date_string=2024-07-26")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options


def length_warning(draft: OpenedDraft, *, longest: int) -> str | None:
    """One line if contexts get longer than those the draft was trained on (K13); the text stays the target's."""
    if not isinstance(draft.draft, DraftNetwork) or draft.about is None:
        return None
    limit = int(draft.about["training"].get("max_length", draft.draft.max_positions))
    if longest <= limit:
        return None
    return (
        f"contexts reach {longest} tokens, the draft was trained on up to {limit}: the text stays exact, "
        "fewer tokens may be accepted; see acceptance by prompt length"
    )


def conditions(bench: Bench, workload: Workload, *, options: BenchOptions, draft: OpenedDraft) -> dict[str, Any]:
    """What must be equal for two sittings to be one run, and what a record's manifest adds, as plain values."""
    prompts = [ids_digest(bench.chat.prompt_ids(each.prompt.messages)) for each in workload.conversations]
    identity = identify_target(bench.target)
    sampling = bench.protocol.sampling
    return {
        "target": {"name": identity.name, "fingerprint": identity.digest, "revision": options.target.revision},
        "draft": draft.about,
        "decoders": [system.about for system in bench.systems],
        "prompt_digest": combined_digest(prompts),
        "files": workload.files,
        "template": {"options": dict(bench.chat.options), "digest": bench.chat.template_digest()},
        "sampling": {**asdict(sampling), "is_greedy": sampling.is_greedy},
        "turns": options.prompts.turns,
        "warmup": options.warmup,
        "dtype": options.target.dtype,
        "device": options.target.device,
        "compile": options.target.compile,
        "engine": bench.target.engine,
        "seed": options.seed,
        "threads": torch.get_num_threads(),
    }
