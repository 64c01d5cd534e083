"""Binds what a request names to what the loop runs: rows from prepared options, a proposer from a draft.

Both doors, ours and transformers', come through here; it knows no arithmetic and no door.
"""

from __future__ import annotations

from paceline.decoding.blocks import BlockProposer
from paceline.decoding.loop import DecodeLoop, RowState
from paceline.decoding.options import Captured, Place, Recorder, draft_sampling, row_process, row_stop
from paceline.decoding.plan import ProposalPlan
from paceline.decoding.propose import LookupProposer, NoDraft, Proposer, SequentialProposer
from paceline.decoding.sampling import DraftSampling, RowDice
from paceline.drafts._base import BlockDraft, DraftNetwork, LookupDraft, SequentialDraft
from paceline.drafts._loaded import LoadedDraft
from paceline.errors import ConfigError, UnsupportedOption
from paceline.targets.generic import Target

Draft = DraftNetwork | LookupDraft
AnyDraft = Draft | LoadedDraft  # what a caller may hand over


def as_draft(given: object) -> Draft | None:
    """The draft that a caller hands over, alone or as `load_draft` returns it; None decodes plainly.

    Raises ConfigError for anything else, such as a name.
    """
    if isinstance(given, LoadedDraft):
        return given.draft
    # A class has the methods of a lookup draft too, and is none.
    if given is None or (isinstance(given, DraftNetwork | LookupDraft) and not isinstance(given, type)):
        return given
    raise ConfigError(f"draft is a {type(given).__name__}; expected what paceline.load_draft returns, or None")


def as_plan(given: object) -> ProposalPlan:
    """The plan that a caller hands over; None is a chain of 5.  Raises ConfigError for anything else."""
    if given is None:
        return ProposalPlan.chain(5)
    if not isinstance(given, ProposalPlan):
        raise ConfigError(f"plan is a {type(given).__name__}; expected a ProposalPlan, such as ProposalPlan.chain(5)")
    return given


def make_proposer(draft: Draft | None, target: Target, *, plan: ProposalPlan, sampling: DraftSampling) -> Proposer:
    """The proposer that fits a draft; None decodes plainly."""
    if draft is None:
        return NoDraft()
    if isinstance(draft, DraftNetwork):
        if draft.vocab.target_size > target.vocab_size:
            raise ConfigError(
                f"the draft was made for a vocabulary of {draft.vocab.target_size} ids; the target has "
                f"{target.vocab_size}"
            )
        misfit = draft.misfit(num_layers=target.num_layers, width=target.hidden_size)
        if misfit:
            raise ConfigError(f"the draft does not fit the target: {misfit}")
        device = next(draft.parameters()).device
        if device != target.device:
            raise ConfigError(f"the draft is on {device}, the target on {target.device}; move one of them")
        draft.borrow(target)
        if isinstance(draft, BlockDraft):
            return BlockProposer(draft, target, plan, sampling)
        assert isinstance(draft, SequentialDraft), f"no proposer for a {type(draft).__name__}"
        return SequentialProposer(draft, target, plan, sampling)
    if plan.law == "sampled":
        raise UnsupportedOption("proposal law 'sampled' needs a draft that is a probability law; use 'ranked'")
    return LookupProposer(draft, plan)


def make_loop(draft: Draft | None, target: Target, *, plan: ProposalPlan, captured: Captured) -> DecodeLoop:
    """The loop for rows made from `captured`."""
    proposer = make_proposer(draft, target, plan=plan, sampling=draft_sampling(captured.config))
    return DecodeLoop(target, proposer, scratch=plan.scratch)


def make_row(captured: Captured, *, row: int, index: int, padding: int, seed: int) -> RowState:
    """The state of row `row` of what transformers prepared, without its `padding` pads; `index` names it in commits."""
    config, device = captured.config, captured.ids.device
    ids = captured.ids[row].tolist()  # sync
    place = Place(row, len(captured.ids), ids[:padding])
    has_scores, has_logits = bool(config.output_scores), bool(config.output_logits)
    recorder = Recorder([], []) if config.return_dict_in_generate and (has_scores or has_logits) else None
    return RowState(
        index=index,
        ids=ids[padding:],
        prompt_length=len(ids) - padding,
        max_new_tokens=int(config.max_length) - len(ids),
        process=row_process(captured.processors, place=place, device=device),
        is_stop=row_stop(captured.criteria, place=place, device=device, recorder=recorder if has_scores else None),
        dice=RowDice(seed),
        is_greedy=not config.do_sample,
        record=recorder,
    )
