"""Records to tables, and tables to Markdown: pure functions, so that a document can be checked against its records.

A document marks a block by `<!-- results:NAME -->` and `<!-- /results -->`; what stands between is made from the
records whose names begin with NAME.  It knows neither files nor colours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from paceline.errors import DataError
from paceline.measure.diagnose_tables import diagnose_tables
from paceline.measure.record import usable
from paceline.measure.study_tables import pair_tables, study_tables
from paceline.measure.table import Record, Table, markdown, pm
from paceline.store.figures import size_text

BLOCK = re.compile(r"(<!-- results:([\w-]+) -->\n)(.*?)(<!-- /results -->)", re.DOTALL)


def bench_tables(record: Record) -> list[Table]:
    """All tables of one `paceline bench` record, the summary first; empty ones are left out."""
    tables = [
        _summary(record),
        _speeds(record),
        _by_depth(record),
        _groups("By workload file", "file", record["per_file"]),
        _groups("By prompt length", "tokens", record["acceptance_by_prompt_length"]),
        _plans(record),
        _shares(record),
    ]
    return [table for table in tables if table.rows]


def comparison(records: Mapping[str, Record]) -> Table:
    """One row per bench record: what a reader of the README looks for."""
    heads = (
        "record", "target", "draft", "plan", "prompts", "accepted length L", "drafted, no bonus", "speed-up (wall)",
        "tokens/s plain", "tokens/s draft", "identical",
    )  # fmt: skip
    rows = [
        (
            name, _named(record, "target"), _named(record, "draft"), record["plan"] or "plain", str(record["n"]),
            pm(record, "accepted_length"), pm(record, "accepted_drafted"), pm(record, "s_wall"),
            pm(record, "tokens_per_s_plain", digits=1), pm(record, "tokens_per_s_draft", digits=1),
            _claim(record["identical"]),
        )
        for name, record in sorted(records.items())
    ]  # fmt: skip
    return Table("Plain and speculative decoding", heads, tuple(rows))


def conditions(record: Record) -> str:
    """Under which conditions a record was made, as one paragraph."""
    manifest = record["manifest"]
    sampling = manifest["sampling"]
    law = "greedy" if sampling["is_greedy"] else f"temperature {sampling['temperature']}, top-p {sampling['top_p']}"
    files = ", ".join(manifest["files"])
    return (
        f"{record['n']} requests of {files}; {law}, at most {sampling['max_new_tokens']} new tokens, batch 1; "
        f"{manifest['dtype']} on {manifest['device_name']}, {manifest['threads']} threads, {manifest['engine']}; "
        f"torch {manifest['versions']['torch']}, transformers {manifest['versions']['transformers']}, "
        f"paceline {manifest['paceline']}. Errors are standard errors by bootstrap over prompts; "
        "plain and speculative runs are interleaved."
    )


def results_block(records: Mapping[str, Record], *, details: bool = True) -> str:
    """Markdown of some records: the comparison of the bench records, then each record's own tables.

    records: name -> record, each with a `kind` that is known here.  Raises DataError for another kind.
    """
    parts: list[str] = []
    bench = {name: record for name, record in records.items() if record.get("kind") == "bench"}
    under: list[str] = []
    for name, record in sorted(bench.items()):
        with usable(name):
            comparison({name: record})
            under.append(f"`{name}`: {record['verdict']} {conditions(record)}")
    parts += [markdown(comparison(bench)), *under] if bench else []
    for name, record in sorted(records.items()) if details else ():
        parts.append(f"### {name}")
        with usable(name):
            parts += [markdown(table) for table in _renderer(name, record)(record)]
    return "\n\n".join(parts)


def rewrite_blocks(document: str, *, records: Mapping[str, Record]) -> str:
    """The document with each marked block made anew.

    `results:core` takes every record whose name begins with `core-`, `results:core-summary` the comparison alone.
    A block without a record says so.  Raises DataError when a block is not closed.
    """
    if document.count("<!-- results:") != len(BLOCK.findall(document)):
        raise DataError("a block <!-- results:NAME --> is not closed; expected <!-- /results --> after it")

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        prefix = name.removesuffix("-summary")
        chosen = {key: record for key, record in records.items() if key.startswith(f"{prefix}-")}
        details = not name.endswith("-summary")
        text = results_block(chosen, details=details) if chosen else f"Not measured yet: no record `{prefix}-*.json`."
        return f"{match[1]}\n{text}\n\n{match[4]}"

    return BLOCK.sub(fill, document)


def _renderer(name: str, record: Record) -> Callable[[Record], list[Table]]:
    kind = str(record.get("kind"))
    if kind not in RENDERERS:
        raise DataError(f"{name}: unknown kind of record {kind!r}; known: {', '.join(RENDERERS)}")
    return RENDERERS[kind]


def _summary(record: Record) -> Table:
    rows = (
        ("accepted length L, with the target's own token", pm(record, "accepted_length")),
        ("accepted drafted tokens a, without it", pm(record, "accepted_drafted")),
        ("mean of the requests' own L", pm(record, "accepted_length_by_request")),
        ("share of tokens that the draft wrote", pm(record, "drafted_share")),
        ("drafted nodes per round", pm(record, "nodes_per_round")),
        ("rounds", str(record["rounds"])),
        ("speed-up, whole call (S_wall)", pm(record, "s_wall")),
        ("speed-up without prefill", pm(record, "s_decode")),
        ("model of the speed-up (S_model), not a speed-up", pm(record, "s_model")),
        ("target call on one row, ms", pm(record, "t_plain", factor=1000, digits=1)),
        ("target call on a proposal, ms", pm(record, "t_verify", factor=1000, digits=1)),
        ("drafting a proposal, ms", pm(record, "t_draft", factor=1000, digits=1)),
    )
    kept = tuple(row for row in rows if row[1] != "-")
    return Table(f"{record['plan'] or 'plain'}: {record['n']} requests", ("metric", "value"), kept)


def _speeds(record: Record) -> Table:
    rows = [("plain", pm(record, "tokens_per_s_plain", digits=1), "1", "-")]
    if record["plan"] is not None:
        speed = pm(record, "tokens_per_s_draft", digits=1)
        rows.append((f"draft, {record['plan']}", speed, pm(record, "s_wall"), _claim(record["identical"])))
    for name, base in record["baselines"].items():
        claim = _claim(base["identical"])
        rows.append((f"{name}: {base['about']}", pm(base, "tokens_per_s", digits=1), pm(base, "s_wall"), claim))
    return Table("Speed", ("decoder", "tokens/s", "speed-up", "same tokens as plain"), tuple(rows))


def _by_depth(record: Record) -> Table:
    heads = ("depth", "accepted if reached", "accepted of all rounds", "offered")
    rows = [
        (str(row["depth"]), pm(row, "conditional", digits=3), pm(row, "cumulative", digits=3), str(row["offered"]))
        for row in record["acceptance_by_depth"]
    ]
    return Table("Acceptance by depth", heads, tuple(rows))


def _groups(title: str, head: str, groups: Mapping[str, Record]) -> Table:
    heads = (head, "n", "L", "speed-up", "plain tok/s", "draft tok/s")
    rows = [
        (
            label, str(group["n"]), pm(group, "accepted_length"), pm(group, "s_wall"),
            pm(group, "tokens_per_s_plain", digits=1), pm(group, "tokens_per_s_draft", digits=1),
        )
        for label, group in groups.items()
    ]  # fmt: skip
    return Table(title, heads, tuple(rows))


def _plans(record: Record) -> Table:
    if not record["other_plans"]:
        return Table("Plans", (), ())
    heads = ("plan", "nodes", "L", "speed-up", "tokens/s", "identical")
    rows = [
        (
            each["plan"], pm(each, "nodes_per_round", digits=1), pm(each, "accepted_length"),
            pm(each, "s_wall"), pm(each, "tokens_per_s_draft", digits=1), _claim(each["identical"]),
        )
        for each in (record, *record["other_plans"])
    ]  # fmt: skip
    return Table("Plans of the same run", heads, tuple(rows))


def _shares(record: Record) -> Table:
    shares = record["time_shares"]
    phases = tuple(next(iter(shares.values()), {}))
    rows = [(name, *(f"{100 * share[phase]:.1f} %" for phase in phases)) for name, share in shares.items() if share]
    return Table("Where the time goes", ("decoder", *phases), tuple(rows))


def _claim(is_identical: bool | None) -> str:
    return "not comparable" if is_identical is None else "yes" if is_identical else "NO"


def _named(record: Record, role: str) -> str:
    return str((record["manifest"].get(role) or {}).get("name", "-"))


def verify_cost_tables(record: Record) -> list[Table]:
    """The target call by number of rows, each engine beside the machine's limit."""
    machine, notes = record["machine"], record["manifest"]["notes"]
    engines = sorted({cost["engine"] for cost in record["costs"]})
    found = {(cost["engine"], cost["nodes"]): cost for cost in record["costs"]}
    rows = []
    for nodes in sorted({cost["nodes"] for cost in record["costs"]}):
        costs = [found[engine, nodes] for engine in engines]
        medians = [f"{cost['median'] * 1e3:.1f} ({cost['lowest'] * 1e3:.1f})" for cost in costs]
        times = [f"{cost['times_limit']:.2f}" for cost in costs] + [f"{cost['times_one']:.2f}" for cost in costs]
        rows.append((str(nodes), *medians, f"{costs[0]['limit'] * 1e3:.1f}", *times))
    heads = (
        "rows", *(f"{engine}, ms: median (lowest)" for engine in engines), "limit, ms",
        *(f"{engine} / limit" for engine in engines), *(f"{engine}: t(n) / t(1)" for engine in engines),
    )  # fmt: skip
    limits = f"{machine['read_gb_per_s']:.1f} GB/s and {machine['gflop_per_s']:.0f} GFLOP/s"
    where = f"{notes['target']}, {notes['context']} tokens of context, {record['manifest']['threads']} threads"
    title = f"Target call of {where}; limit from {limits}"
    return [Table(title, heads, tuple(rows))]


def training_cost_tables(record: Record) -> list[Table]:
    """A training step, part by part, beside the time that its products would take at the machine's peak."""
    cost, manifest = record["cost"], record["manifest"]
    seconds, gflop, peak = cost["seconds"], cost["gflop"], cost["peak_gflop_per_s"]
    whole = sum(seconds.values())
    rows = [
        (
            part, f"{spent * 1e3:.0f}", f"{100 * spent / whole:.0f} %", f"{gflop[part]:.0f}",
            f"{gflop[part] / peak * 1e3:.0f}",
        )
        for part, spent in seconds.items()
    ]  # fmt: skip
    total = sum(gflop.values())
    rows.append(("whole step", f"{whole * 1e3:.0f}", "100 %", f"{total:.0f}", f"{total / peak * 1e3:.0f}"))
    title = (
        f"Training step of {manifest['notes']['target']}, {cost['tokens']:.0f} tokens, {manifest['threads']} threads, "
        f"{manifest['dtype']}: {cost['tokens_per_s']:.0f} tokens/s, {100 * cost['share_of_peak']:.0f} % of a peak of "
        f"{peak:.0f} GFLOP/s, {size_text(cost['memory'])} at most"
    )
    heads = ("part", "ms", "share", "GFLOP in products", "ms at the peak")
    return [Table(title, heads, tuple(rows))]


RENDERERS: Mapping[str, Callable[[Record], list[Table]]] = {
    "bench": bench_tables,
    "diagnose": diagnose_tables,
    "verify-cost": verify_cost_tables,
    "training-cost": training_cost_tables,
    "study": study_tables,
    "pair": pair_tables,
}
