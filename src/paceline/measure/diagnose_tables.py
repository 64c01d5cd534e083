"""Tables of a diagnosis, drafts side by side: pure functions of the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.measure.table import Record, Table, pm

METRICS: Mapping[str, str] = {
    "accepted_length": "accepted length L, with the target's own token",
    "nodes_per_round": "drafted nodes per round",
    "pruned_share": "draft's greedy path pruned, share of rounds",
    "greedy_kept_share": "share of its nodes that were verified",
    "greedy_coincidence": "accepted path along the greedy one, of rounds that accept",
    "greedy_coincidence_all": "the same of all rounds, nothing accepted counts as along",
    "greedy_coincidence_strict": "the same of all rounds, nothing accepted does not",
    "greedy_whole": "greedy path accepted to its end, of all rounds",
    "accepting_share": "rounds that accept something",
    "token_calibration_error": "calibration error of a token's q",
    "token_excess": "its mean q minus accepted share",
    "path_calibration_error": "calibration error of a path's q",
    "path_excess": "its mean q minus accepted share",
    "entropy_accepted": "entropy of q where a token was accepted, nats",
    "entropy_rejected": "entropy of q where none was, nats",
    "entropy_missed": "of these, where the target left the tree",
    "entropy_behind": "of these, behind a rejected token",
}
REASONS: Mapping[str, str] = {
    "depth": "the proposal ended there",
    "vocabulary": "outside the draft's vocabulary",
    "pruned": "within the plan's width, yet not verified",
    "width": "beyond the plan's width",
    "unread": "the draft was not run at that node",
}


def diagnose_tables(record: Record) -> list[Table]:
    """All tables of one `paceline diagnose` record, drafts side by side where they fit; empty ones are left out."""
    drafts: Sequence[Record] = record["drafts"]
    tables = [
        _main(record, drafts),
        _differences(record),
        *(_by_depth(draft) for draft in drafts),
        _reasons(drafts),
        _ranks(drafts),
        *(_calibration(draft) for draft in drafts),
    ]
    return [table for table in tables if table.rows]


def _names(drafts: Sequence[Record]) -> tuple[str, ...]:
    return tuple(str(draft["name"]) for draft in drafts)


def _main(record: Record, drafts: Sequence[Record]) -> Table:
    rows = [(label, *(pm(draft, name, digits=3) for draft in drafts)) for name, label in METRICS.items()]
    rows.append(("rounds", *(str(draft["rounds"]) for draft in drafts)))
    return Table(f"{record['plan']}: {record['n']} prompts", ("metric", *_names(drafts)), tuple(rows))


def _differences(record: Record) -> Table:
    found: Sequence[Record] = record["differences"]
    if not found:
        return Table("Differences", (), ())
    rows = [(label, *(pm(each, name, digits=3) for each in found)) for name, label in METRICS.items()]
    heads = tuple(str(each["draft"]) for each in found)
    return Table(f"Minus {found[0]['against']}, paired over prompts", ("metric", *heads), tuple(rows))


def _by_depth(draft: Record) -> Table:
    heads = ("depth", "accepted if reached", "accepted of all rounds", "offered")
    rows = [
        (
            str(row["depth"]), pm(row, "conditional", digits=3), pm(row, "cumulative", digits=3),
            str(row["offered"]),
        )
        for row in draft["acceptance_by_depth"]
    ]  # fmt: skip
    return Table(f"{draft['name']}: acceptance by depth", heads, tuple(rows))


def _reasons(drafts: Sequence[Record]) -> Table:
    rows: list[tuple[str, ...]] = []
    for reason, label in REASONS.items():
        found = [draft["misses"]["reasons"][reason] for draft in drafts]
        if any(each["count"] for each in found):
            rows.append((label, *(pm(each, "share", digits=3) for each in found)))
    return Table("The target's token where it left the proposal, shares", ("why", *_names(drafts)), tuple(rows))


def _ranks(drafts: Sequence[Record]) -> Table:
    columns: Sequence[Sequence[Record]] = [draft["misses"]["ranks"] for draft in drafts]
    rows = [
        (_range(row[0]), *(f"{each['share']:.3f} ({each['count']})" if each["count"] else "-" for each in row))
        for row in zip(*columns, strict=True)
        if any(each["count"] for each in row)
    ]
    return Table("Its rank in the draft's law, shares (rounds)", ("rank", *_names(drafts)), tuple(rows))


def _range(rank: Record) -> str:
    first, last = rank["first"], rank["last"]
    return f"{first}+" if last is None else str(first) if first == last else f"{first}-{last}"


def _calibration(draft: Record) -> Table:
    heads = ("q", "tokens", "mean q", "accepted", "paths", "mean q", "accepted")
    rows: list[tuple[str, ...]] = []
    for token, path in zip(draft["calibration"]["token"], draft["calibration"]["path"], strict=True):
        cells = [cell for each in (token, path) for cell in _cells(each)]
        if token["count"] or path["count"]:
            rows.append((f"{token['low']:.1f}-{token['high']:.1f}", *cells))
    return Table(f"{draft['name']}: confidence against acceptance", heads, tuple(rows))


def _cells(each: Record) -> tuple[str, ...]:
    confidence = "-" if each["confidence"] is None else f"{each['confidence']:.3f}"
    return str(each["count"]), confidence, pm(each, "accepted", digits=3)
