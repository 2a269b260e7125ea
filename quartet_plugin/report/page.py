"""report.html: one file about a run that needs nothing else, no network and no script."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quartet_plugin.model.history import RunHistory, TrialRow
from quartet_plugin.model.measurement import Measurement
from quartet_plugin.model.plan import Plan
from quartet_plugin.report import figures, markup, page_tables
from quartet_plugin.report.axis_gains import axis_section
from quartet_plugin.report.document import document
from quartet_plugin.report.drift_words import drift_paragraph
from quartet_plugin.report.final_choice import choice_paragraph
from quartet_plugin.report.formatting import clean, duration, iteration_words, rate, size, speedup_spread
from quartet_plugin.report.kept_knobs import kept_section
from quartet_plugin.report.launch_words import baseline_words
from quartet_plugin.report.noise import noise_words
from quartet_plugin.report.other_model import other_model_words
from quartet_plugin.report.plan_difference import difference_sentence
from quartet_plugin.report.search_expense import expense_card
from quartet_plugin.report.shape_curve import shape_figure
from quartet_plugin.report.speedups import predicted_speedup
from quartet_plugin.report.status import counts_words, regret_base, regret_words, slow_node_words, stamp
from quartet_plugin.report.tables import CLASS_MEANING, OBJECTIVE_WORDS, changes, confidence
from quartet_plugin.report.throughput import peak_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A drawing that was made elsewhere, with its heading and caption."""

    heading: str
    svg: str
    caption: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """The parts of a page that are not in the run's history.

    `train` are the lines that train with the winner, `flags` those without the plugin, or why there are none.
    `parity` is the parity gate's verdict on it in words. `fault` says why the study could not be read.
    """

    importance: Mapping[str, float] = field(default_factory=dict)
    timelines: Sequence[Picture] = ()
    train: Sequence[str] = ()
    flags: Sequence[str] = ()
    parity: str | None = None
    fault: str | None = None


def page(history: RunHistory, extras: Extras) -> str:
    """The whole file."""
    sections = (
        _head(history),
        _cards(history),
        _intervals(history),
        axis_section(history),
        markup.pair(_changes(history), _memory(history)),
        *(
            markup.section(t.heading, markup.figure(markup.scrolled(t.svg, label=t.heading), t.caption))
            for t in extras.timelines
        ),
        kept_section(history),
        _regret(history),
        _progress(history),
        _shapes(history),
        markup.pair(_importance(extras), _predictions(history)),
        _train(history, extras),
        page_tables.trials(history),
        page_tables.failed(history),
        page_tables.left_out(history),
        page_tables.provenance(history, extras.fault),
    )
    return document(f"{history.name}: quartet report", sections)


def _head(history: RunHistory) -> str:
    framework = ""
    baseline = history.baseline
    if baseline is not None and baseline.plan is not None:
        made = baseline.plan.made_for
        nodes = len(made.nodes)
        framework = (
            f"{made.framework} {made.framework_version}, {made.world_size} processes on "
            f"{nodes} node{'s' if nodes > 1 else ''}, "
        )
    begun = "" if history.began_at is None else f"started {stamp(history.began_at)}, "
    return (
        f"<h1>{markup.text(history.name)}</h1>\n"
        f'<p class="sub">{markup.text(framework + begun + counts_words(history))}</p>\n'
        f"{_verdict(history)}"
    )


def _verdict(history: RunHistory) -> str:
    notes = [note for note in (history.baseline_note, *slow_node_words(history)) if note]
    return _verdict_on_search(history) + "".join(
        markup.note(f"{note[0].upper()}{note[1:]}.") for note in notes
    )


def _verdict_on_search(history: RunHistory) -> str:
    baseline = baseline_words(history)
    if history.winner is not None and history.winner.measurement is not None:
        comparison = history.winner.measurement
        rounds = comparison.plan.num_launches
        return (
            f'<p class="verdict">Trial {history.winner.provenance.trial} is '
            f"<strong>{speedup_spread(comparison.speedup)}</strong> as fast as {baseline}.</p>\n"
            f"{markup.note(f'Against your command: {difference_sentence(history.winner)}.')}\n"
            f"{_other_model(history)}"
            f'<p class="note">In {markup.text(OBJECTIVE_WORDS[comparison.objective])}, measured in turns '
            f"with it over {rounds} rounds; {100 * confidence(comparison):.0f} % interval."
            f"{_predicted(history.winner)}</p>"
            f"{_choice(history.winner)}"
        )
    if history.state == "finished":
        verdict = f"<strong>No better plan was found:</strong> {baseline} stays as it is."
        return f'<p class="verdict none">{verdict}</p>'
    state = {"running": "runs", "elsewhere": "runs on another host"}.get(history.state, "was stopped")
    return (
        f'<p class="verdict open"><strong>The search {state}:</strong> the page shows the results so far.</p>'
    )


def _predicted(winner: Plan) -> str:
    predicted = predicted_speedup(winner)
    return "" if predicted is None else f" Predicted before its launch: {predicted:.2f}x."


def _other_model(history: RunHistory) -> str:
    # The second ends with a file's path, for copying.
    return "".join(f"{markup.note(words[0].upper() + words[1:])}\n" for words in other_model_words(history))


def _choice(winner: Plan) -> str:
    words = choice_paragraph(winner)
    return f"\n{markup.note(words)}" if words else ""


def _cards(history: RunHistory) -> str:
    baseline, best = history.baseline, history.best
    cards: list[tuple[str, str, str]] = []
    chosen = history.winner.measurement if history.winner else None
    if chosen is not None:
        cards.append(_card(baseline_words(history), chosen.baseline.iteration_s.median, chosen.baseline))
    elif baseline is not None and baseline.iteration_s is not None:
        cards.append(_card("your command", baseline.iteration_s, baseline))
    if chosen is not None:
        cards.append(_card("best plan", chosen.plan.iteration_s.median, chosen.plan))
    elif best is not None and best.number > 0:
        cards.append(_card(f"best single trial, {best.number}", best.iteration_s or 0.0, best))
    launched = [row for row in history.trials if row.number > 0 and row.repeats is None]
    failed = sum(bool(row.verdict) and not row.is_measured for row in launched)
    cards.append(
        (
            "trials",
            f"{history.num_spent}",
            f"of {history.num_asked} requested; {failed} without a measurement",
        )
    )
    wall_s = sum(row.wall_s for row in history.trials)
    cards.append(("time in trials", duration(wall_s), f"the session took {duration(history.elapsed_s)}"))
    cards.append(expense_card(history))
    # Of a winner what its final rounds measured, as `quartet show` says it.
    user: Measurement | TrialRow | None = baseline if chosen is None else chosen.baseline
    peak: Measurement | TrialRow | None = best if chosen is None else chosen.plan
    cards += _mfu_cards(history, user, peak)
    if peak is not None and peak.peak_memory_bytes:
        before = 0 if user is None else user.peak_memory_bytes
        where = "in its trial" if chosen is None else "the highest of the final rounds"
        was = f"{where}, was {size(before)}" if before else where
        cards.append(("peak memory of a process", size(peak.peak_memory_bytes), was))
    items = "".join(
        f"<div><dt>{markup.text(name)}</dt><dd>{markup.text(value)}<small>{markup.text(note)}</small></dd></div>"
        for name, value, note in cards
    )
    return f'<dl class="cards">{items}</dl>'


def _mfu_cards(
    history: RunHistory, user: Measurement | TrialRow | None, best: Measurement | TrialRow | None
) -> list[tuple[str, str, str]]:
    """MFU of the best and of the user's own, where the device library knows the devices' peak."""
    peak = peak_of(history.nodes, history.precision) if history.nodes else None
    flops_per_s = None if best is None else best.model_flops_per_s_per_device
    if peak is None or not flops_per_s:
        return []
    before = 0.0 if user is None else user.model_flops_per_s_per_device or 0.0
    was = f"was {100 * before / peak.flops_per_s:.1f} %, " if before else ""
    words = f"{was}of the devices' {peak.precision} peak"
    return [("MFU", f"{100 * flops_per_s / peak.flops_per_s:.1f} %", words)]


def _card(name: str, iteration_s: float, speed: Measurement | TrialRow) -> tuple[str, str, str]:
    tokens_per_s, flops_per_s = speed.tokens_per_s or 0.0, speed.model_flops_per_s_per_device or 0.0
    return (
        name,
        f"{iteration_words(iteration_s)} s",
        f"{tokens_per_s:,.0f} tokens/s, {rate(flops_per_s)} per device",
    )


def _intervals(history: RunHistory) -> str:
    drawn = [svg for svg in (figures.iteration_times(history), figures.speedups(history)) if svg is not None]
    if not drawn:
        return markup.section("Best against baseline", markup.note("The final rounds measured no plan."))
    caption = (
        "Dots are medians over the final rounds. Bars of seconds show the range of the launches (with more "
        "than five launches, the 95 % interval), bars of speedups the test's 95 % interval; short marks are "
        "single rounds. A plan wins only if a sequential test proves it faster: if all plans are as fast as "
        "your command, one passes in less than 2 % of searches. If several plans pass, the one that is "
        "faster in the same rounds wins. A plan that could no longer win left after fewer rounds."
    )
    noise = noise_words(history)
    note = markup.note(f"{noise[:1].upper()}{noise[1:]}.") if noise else ""
    return markup.section("Best against baseline", markup.figure(markup.pair(*drawn), caption) + note)


def _regret(history: RunHistory) -> str:
    lines = []
    if history.regret is not None:
        base = regret_base(history)
        lines.append(regret_words(history.regret, compared_with=base, checks=history.drift_checks))
    if history.limits:
        limits = "; ".join(clean(line, limit=200) for line in history.limits)
        lines.append(f"The space was too large to predict every plan: {limits}.")
    return markup.section("Regret", "\n".join(map(markup.note, lines)))


def _progress(history: RunHistory) -> str:
    caption = (
        f"In {OBJECTIVE_WORDS[history.objective]}. Each point is a single measurement, so the best value is "
        "partly luck. The line is the best value so far. Hollow points are repeats of an earlier plan or "
        "unstable measurements, crosses are plans that were refused or failed."
    )
    if history.drift_checks:
        caption += (
            " Diamonds are later measurements of your command, which show the machine's drift. Trials "
            "after a significant drift are compared with the later measurement, so equal seconds may give "
            "different speedups. "
            f"{drift_paragraph(history.drift_checks)}"
        )
    wide, narrow = figures.progress(history), figures.progress(history, width=figures.HALF)
    if wide is None or narrow is None:
        return ""
    return markup.section("History", markup.figure(markup.by_width(wide, narrow), caption))


def _shapes(history: RunHistory) -> str:
    curve = history.shape_curve
    if curve is None:
        return ""
    caption = (
        f"The best plan of each shape at an equal budget, in {OBJECTIVE_WORDS[curve.objective]} over your "
        "command's. Dots were measured in single trials. Hollow points are values of the model as "
        "calibrated at the end of the search: fitted if a trial measured the shape, predicted otherwise."
    )
    return _drawn("Width and depth", shape_figure(curve), caption)


def _drawn(heading: str, svg: str | None, caption: str) -> str:
    return "" if svg is None else markup.section(heading, markup.figure(svg, caption))


def _importance(extras: Extras) -> str:
    svg = figures.importance(extras.importance)
    if svg is None and extras.fault:
        return markup.section("Parameter importance", markup.note(extras.fault))
    caption = (
        "PED-ANOVA over the finished trials: the choices that separate the fast plans from the other tried "
        "plans. A search tries plans where it expects gains, so the trials show little about a choice that "
        "most of them share; the section on each axis shows predictions for the winner only."
    )
    return _drawn("Parameter importance", svg, caption)


def _predictions(history: RunHistory) -> str:
    svg = figures.predicted_measured(history)
    words = "" if svg is None else figures.prediction_words(history)
    caption = (
        "Each plan's prediction before its launch, compared with its trial, not with the final rounds. "
        f"Points on the dashed line were predicted exactly. {words}."
    )
    return _drawn("Predicted against measured", svg, caption)


def _memory(history: RunHistory) -> str:
    baseline = history.baseline
    best = history.row(history.winner.provenance.trial) if history.winner else history.best
    rows = [] if baseline is None else [(figures.legend_of(baseline), "baseline", baseline)]
    if best is not None and best.number > 0:
        rows.append((figures.legend_of(best), "won" if history.winner else "other", best))
    svg = figures.memory(rows)
    caption = (
        "The highest peak among each pipeline rank's processes, as the framework reported it in each plan's "
        "trial; the final rounds measured their peaks separately."
    )
    drawn = "" if svg is None else markup.figure(svg, caption)
    every_rank = page_tables.rank_memory([(name, row) for name, _, row in rows])
    return markup.section("Memory per stage and rank", drawn + every_rank)


def _changes(history: RunHistory) -> str:
    best = history.best
    plan = history.winner or (best.plan if best is not None and best.number > 0 else None)
    if plan is None:
        return ""
    rows = [
        (
            change.part,
            change.before,
            change.after,
            f"{change.change_class}: {CLASS_MEANING[change.change_class]}",
        )
        for change in changes(plan)
    ]
    if not rows:
        return ""
    heading = "What the best plan changes" if history.winner else "What the best single trial changes"
    return markup.section(
        heading, markup.table(("part", "yours", "the plan's", "class"), rows, label=heading)
    )


def _train(history: RunHistory, extras: Extras) -> str:
    if history.winner is None or not extras.train:
        return ""
    parts = ["<p>With the plugin, on the unmodified framework:</p>", markup.pre(extras.train)]
    if extras.parity:
        parts.append(f"<p>{markup.text(extras.parity)}</p>")
    if extras.flags:
        parts += [
            "<p>Without the plugin, as far as the framework's own settings express the plan:</p>",
            markup.pre(extras.flags),
        ]
    return markup.section("Train with the best plan", "".join(parts))
