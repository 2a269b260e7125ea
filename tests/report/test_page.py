"""report.html: what it says, that nothing in it runs, and what a browser makes of it."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.cli.report import timelines
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.history import RankMemory, RunHistory, TrialRow
from quartet_plugin.model.plan import Plan, ScheduleChoice, Split
from quartet_plugin.model.schema import dump
from quartet_plugin.protocol.rank_files import ActionTimes
from quartet_plugin.report.contrast import contrast
from quartet_plugin.report.formatting import SECONDS_HEAD, SPEEDUP_HEAD, bubble_words
from quartet_plugin.report.gantt import timeline
from quartet_plugin.report.markup import PIECE, breakable
from quartet_plugin.report.page import Extras, Picture, page
from quartet_plugin.report.plan_timeline import flop_costs, simulated_plan
from quartet_plugin.report.timeline import KIND_NAMES
from quartet_plugin.schedule import simulate as simulation_module
from quartet_plugin.schedule.choice import choice_of, generated
from quartet_plugin.schedule.files import order_texts
from quartet_plugin.schedule.named import named
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.simulate import Simulation, simulate
from tests.model.plans import PLAN, plan_with
from tests.report.browser import (
    Measured,
    Opened,
    measure_page,
    open_page,
    picture,
    pictures_folder,
    print_page,
)
from tests.report.histories import HOLDER, INTERLEAVED, RUNNING, WINNER, history, refused, row
from tests.report.test_shape_curve import CURVE
from tests.schedule.orders import unit_costs

ATTACKS = (
    "<script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=1">',
    "</style><script>alert(1)</script>",
    "</title><script>alert(1)</script>",
    "--></svg><iframe src='https://example.com/'></iframe>",
    "javascript:alert(1)",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
)
MANY_STAGES = plan_with(
    shape=replace(PLAN.shape, num_layers=64),
    layout=replace(PLAN.layout, virtual_stages=16),
    split=Split(transformer_layers_per_stage=(2,) * 32),
    schedule=ScheduleChoice(name="interleaved", group=2),
)
VOID = {"meta", "link", "br", "wbr", "img", "input"}
EXTRAS = Extras(
    importance={
        "layout": 0.2,
        "layout.2": 0.1,
        "micro_batch_size[1,2,4,8]": 0.2,
        "split.embedding": 0.2,
        "split.head": 0.1,
        "schedule[1f1b,zb-h1]": 0.1,
        "mapping[pp2]": 0.1,
    },
    train=["sh /runs/heavy-head/best/command.sh"],
    flags=["--pipeline-model-parallel-layout 'Etttttt|ttL'"],
)


class Elements(HTMLParser):
    """Every element, its attributes, and the text outside of style."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"{tag} closes another element at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(markup: str) -> Elements:
    elements = Elements()
    elements.feed(markup)
    assert elements._open == []
    return elements


def whole(run: RunHistory, folder: Path = Path("/runs/heavy-head")) -> str:
    return page(run, replace(EXTRAS, timelines=timelines(run, path=folder)))


def poisoned(attack: str) -> RunHistory:
    """A run with the attack in every text that it has."""
    run = history()
    labels = dict.fromkeys(("shape", "layout", "split", "schedule", "mapping"), attack)
    rows: tuple[TrialRow, ...] = (
        *run.trials,
        row(7, 0.45, labels=labels, outcome=attack),
        refused(8, attack, labels=labels, folder=attack),
    )
    nodes = tuple(replace(node, host=attack, node_class=attack) for node in run.nodes)
    return replace(
        run,
        name=attack,
        path=attack,
        cwd=attack,
        command=("torchrun", attack),
        storage=attack,
        trials=rows,
        nodes=nodes,
        features=(attack,),
        neutralised=(attack,),
        locked={attack: attack},
        quartet_version=attack,
        faults=(attack,),
    )


def test_the_page_says_what_was_found() -> None:
    text = read(whole(history())).text
    assert "1.25x (1.19x to 1.31x)" in text
    assert "as fast as your command" in text
    assert "5 of 7 trials" in text
    for heading in (
        "Best against baseline",
        "History",
        "Parameter importance",
        "Predicted against measured",
        "Memory per stage and rank",
        "Timeline of your command",
        "Timeline of the best plan",
        "Train with the best plan",
        "Every trial",
        "Refused and failed",
        "Flags and axes left out",
    ):
        assert heading in text
    assert "rank 1: torch.OutOfMemoryError (1 GiB too much)" in text
    assert "no progress for 30 s" in text
    assert "as trial 2" in text
    assert "--save, --tensorboard-dir" in text
    assert "Not tuned because of moe (docs/support.md): mapping" in text
    assert "sh /runs/heavy-head/best/command.sh" in text
    assert "Etttttt|ttL" in text


def test_every_picture_is_there() -> None:
    assert re.findall(r'<svg [^>]*aria-label="(\w+)', whole(history())) == [
        "Seconds", "Speedup", "Peak", "Simulated", "Simulated", "Objective", "Objective",
        "Parameter", "Predicted",
    ]  # fmt: skip


def test_a_screen_reader_has_a_name_for_every_drawing() -> None:
    markup = whole(history(shape_curve=CURVE))
    assert '<html lang="en">' in markup
    drawings = re.findall(r"<svg[^>]*>", markup)
    assert len(drawings) == 10
    for drawing in drawings:
        assert 'role="img"' in drawing
        assert re.search(r'aria-label="[^"]*\w[^"]*"', drawing)
    # A region or a drawing may stand twice for two widths; else no two have the same name.
    names = re.findall(r'aria-label="([^"]*)"', re.sub(r'<div class="narrow">.*?</svg>', "", markup))
    assert len(names) == len(set(names))
    assert re.findall(r"<th(?! scope=)[^>a-z]", markup) == []
    assert [level for level in re.findall(r"<h(\d)>", markup) if level != "2"] == ["1"]


def test_what_mattered_is_said_in_the_words_of_the_other_tables() -> None:
    markup = whole(history())
    text = read(markup).text
    for words, share in (("degrees of parallelism", "30.0 %"), ("split", "30.0 %"), ("rank order", "10.0 %")):
        assert words in text
        assert share in text
    for parameter in set(EXTRAS.importance) - {"layout"}:
        assert parameter not in markup
    assert not re.search(r"[a-z]\[[a-z0-9]", text), "no parameter of the study with its choices"


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_colour_of_the_timelines_legend_means_one_thing(chunks: int) -> None:
    order = named("zb-v" if chunks == 2 else "zb-h1", num_devices=2, num_microbatches=4)
    svg = timeline(order, simulate(order, unit_costs(order)), label="x")
    assert svg is not None
    legend = re.findall(r'<rect [^>]*fill="(#[0-9a-f]{6})"', svg)
    num_kinds = sum(f"{kind.name} {words}" in svg for kind, words in KIND_NAMES.items())
    assert len(legend) == len(set(legend)) == num_kinds * chunks
    assert ("chunk 0 to 1" in svg) == (chunks == 2)


def test_a_split_of_many_stages_may_be_broken() -> None:
    counts = "+".join(["1"] * 64)
    broken = breakable(counts)
    assert read(f"<p>{broken}</p>").text.replace(" ", "") == counts
    pieces = broken.split("<wbr>")
    assert len(pieces) > 2
    assert all(piece.endswith("+") for piece in pieces[:-1])
    assert all(PIECE <= len(piece) < 2 * PIECE for piece in pieces)
    assert breakable("1+1+2+1+1+1+1+0") == "1+1+2+1+1+1+1+0"
    assert breakable(f"<b>+{counts}").startswith("&lt;b&gt;+1+")
    assert breakable(long := MANY_STAGES.split.label) in whole(
        history(trials=(*history().trials, row(7, 0.5, plan=MANY_STAGES)))
    )
    assert "<wbr>" in breakable(long)


def test_a_page_without_a_winner_says_so_plainly() -> None:
    text = read(whole(history(winner=None))).text
    assert "No better plan was found" in text
    assert "Train with the best plan" not in text


def test_a_stock_plan_in_the_place_of_a_command_that_does_not_fit_is_named() -> None:
    run = history(baseline_note="your command does not fit; the baseline is trial 1")
    text = page(run, Extras())
    assert "as fast as the best stock plan that fits" in text
    assert ">your command: 0.500 (" not in text
    assert ">your command: 0.500 (" in page(history(), Extras())


def test_a_run_that_has_hardly_begun_has_a_page() -> None:
    bare = history(
        trials=(row(0, 0.5, plan=None),), finalists=(), winner=None, state="running", num_spent=0,
        holder=HOLDER, running=(RUNNING,),
    )  # fmt: skip
    text = read(page(bare, Extras())).text
    assert "The search runs" in text
    assert "None: every trial was measured." in text
    empty = replace(bare, trials=(), nodes=(), began_at=None)
    assert "0 of 7 trials" in read(page(empty, Extras())).text


@pytest.mark.parametrize("plan", [WINNER, INTERLEAVED])
def test_the_timeline_is_the_plans_own(plan: object) -> None:
    run = history(winner=replace(WINNER, layout=plan.layout, split=plan.split, schedule=plan.schedule))  # type: ignore[attr-defined]
    before, after = timelines(run, path=Path("/nowhere"))
    assert "500 ms a step" in before.caption
    assert "scaled to the measured iteration" in after.caption
    assert "400 ms a step" in after.caption


def test_the_timelines_before_and_after_have_one_scale() -> None:
    before, after = timelines(history(), path=Path("/nowhere"))
    ticks = [re.findall(r'x="([\d.]+)"[^>]*class="tick"[^>]*>([\d.]+)<', one.svg) for one in (before, after)]
    assert ticks[0] == ticks[1]
    assert len(ticks[0]) > 3
    assert "on the scale of the timeline above" in after.caption


def test_a_schedule_of_ours_is_simulated_and_as_it_was_recorded(tmp_path: Path) -> None:
    order = named("zb-v", num_devices=2, num_microbatches=WINNER.num_microbatches)
    plan = replace(
        WINNER,
        layout=replace(WINNER.layout, virtual_stages=2),
        split=Split(transformer_layers_per_stage=(2, 2, 2, 2)),
        schedule=ScheduleChoice(name="custom", custom=choice_of(order, unit_costs(order))),
    )
    made = simulated_plan(plan, iteration_s=0.5)
    assert made is not None
    schedule, simulation, words = made
    assert simulation.makespan_s == pytest.approx(0.5)
    assert words.startswith("500 ms a step, bubble ")
    assert words.endswith(": stage times are those stored in the plan, scaled to the measured iteration")
    assert schedule.placement == (0, 1, 1, 0)
    folder = tmp_path / "trials/000002/attempt-1"
    folder.mkdir(parents=True)
    for device in range(schedule.num_devices):
        starts = simulation.start_s[device].tolist()
        sheet = ActionTimes(
            schema_version=1,
            attempt_id="0" * 32,
            launch_rank=device,
            device=device,
            replica=0,
            begin_at=1000.0,
            actions=tuple(order_texts(schedule.orders[device], num_microbatches=schedule.num_microbatches)),
            start_s=tuple(starts),
            end_s=tuple(simulation.end_s[device].tolist()),
            waiting_s=(0.0,) * len(starts),
        )
        write_json_atomic(folder / f"rank-{device}.actions.json", dump(sheet))
    best = replace(plan, provenance=replace(plan.provenance, trial=2))
    pictures = timelines(history(winner=best), path=tmp_path)
    assert [one.heading for one in pictures] == [
        "Timeline of your command",
        "Timeline of the best plan",
        "The same step, measured",
    ]
    assert "bubble" in pictures[2].caption
    simulated, measured = (len(re.findall(r"M\d", one.svg)) for one in pictures[1:])
    assert simulated == measured
    (folder / "rank-0.actions.json").write_text("{}")
    assert len(timelines(history(winner=best), path=tmp_path)) == 2


@pytest.mark.parametrize("plan", [WINNER, INTERLEAVED])
@pytest.mark.parametrize("num_microbatches", [64, 4096])
def test_the_step_of_many_microbatches_is_not_simulated_whole(
    plan: Plan, num_microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = replace(
        plan,
        made_for=replace(
            plan.made_for,
            global_batch_size=num_microbatches * plan.layout.micro_batch_size * plan.layout.data_parallel,
        ),
    )
    assert many.num_microbatches == num_microbatches
    sizes: list[int] = []

    def counted(schedule: Schedule, *arguments: object) -> Simulation:
        sizes.append(schedule.num_microbatches)
        return simulate(schedule, *arguments)  # type: ignore[arg-type]

    expected = simulate(
        generated(many.schedule, layout=many.layout, num_microbatches=num_microbatches),
        flop_costs(many).ratios,
    )
    monkeypatch.setattr(simulation_module, "simulate", counted)
    made = simulated_plan(many, iteration_s=0.5)
    assert made is not None
    assert f"bubble {bubble_words(expected.bubble_fraction)}:" in made[2]
    assert max(sizes[:2]) <= 64


def test_a_plan_without_a_pipeline_has_no_timeline() -> None:
    flat = replace(
        WINNER,
        layout=replace(WINNER.layout, pipeline_parallel=1, data_parallel=2),
        split=Split(transformer_layers_per_stage=(8,)),
        schedule=ScheduleChoice(name="no-pipelining"),
    )
    (before,) = timelines(history(winner=flat), path=Path("/nowhere"))
    assert before.heading == "Timeline of your command"
    assert before.caption.endswith("; the best plan has no pipeline, and so no timeline.")
    own = replace(flat, provenance=replace(flat.provenance, trial=0))
    assert timelines(history(trials=(row(0, 0.5, plan=own),), winner=None), path=Path("/nowhere")) == []


def test_the_memory_of_every_rank_is_there() -> None:
    run = history()
    chosen = run.winner.provenance.trial if run.winner else 0
    ranks = (RankMemory(rank=0, peak_bytes=5 * 2**30), RankMemory(rank=1, peak_bytes=7 * 2**30))
    rows = tuple(replace(one, ranks=ranks) if one.number == chosen else one for one in run.trials)
    text = read(whole(replace(run, trials=rows))).text
    table = text.partition("Peak memory of every rank (2)")[2].split("Timeline of")[0]
    assert table.startswith(" RANK your command trial ")
    assert table.strip().endswith("0 2 GiB 5 GiB 1 3 GiB 7 GiB")
    bare = tuple(replace(one, ranks=()) for one in run.trials)
    assert "Peak memory of every rank" not in whole(replace(run, trials=bare))


@pytest.mark.parametrize("attack", ATTACKS)
def test_names_stay_text(attack: str) -> None:
    clean_page, markup = read(whole(history())), whole(poisoned(attack))
    found = read(markup)
    for name in ("script", "img", "iframe", "object", "embed", "form", "a"):
        assert name not in found.names
    assert found.names.count("style") == 1
    assert not [name for name, _ in found.attributes if name.startswith("on") or name == "style"]
    allowed = {name for name, _ in clean_page.attributes}
    assert {name for name, _ in found.attributes} <= allowed
    assert attack in found.text


@settings(deadline=None, max_examples=40)
@given(st.text(min_size=1, max_size=80))
def test_no_text_breaks_the_page(text: str) -> None:
    elements = read(page(poisoned(text), Extras(fault=text, train=[text], flags=[text])))
    assert "script" not in elements.names


def test_nothing_is_fetched_and_nothing_may_run() -> None:
    found = read(whole(poisoned("x")))
    policy = next(value for name, value in found.attributes if name == "content" and "default-src" in value)
    assert "default-src 'none'" in policy
    assert "script-src" not in policy
    assert "unsafe" not in policy
    links = [value for name, value in found.attributes if name in ("src", "href")]
    assert links == ["data:,"]
    assert not re.search(r"url\(|@import|https?:", whole(history()).replace("http://www.w3.org/2000/svg", ""))


# In a browser


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(whole(poisoned(ATTACKS[0])), encoding="utf-8")
    return open_page(path)


def test_the_browser_has_nothing_to_complain_about(opened: Opened) -> None:
    assert opened.console == ()


def test_the_browser_shows_the_figures_and_the_attack_as_text(opened: Opened) -> None:
    assert opened.document.count("<svg") == 9
    assert (
        "<title>&lt;script&gt;document.title='owned'&lt;/script&gt;: quartet report</title>"
        in opened.document
    )
    assert "<script" not in opened.document
    found = read(opened.document)
    assert ATTACKS[0] in found.text


def test_the_policy_stops_a_script_that_is_there_all_the_same(tmp_path: Path) -> None:
    """And so the console is really read: the browser says that it refused."""
    path = tmp_path / "report.html"
    script = "<script>document.body.textContent = 'owned'</script>"
    path.write_text(whole(history()).replace("</main>", f"{script}</main>"), encoding="utf-8")
    found = open_page(path)
    assert any("Content Security Policy" in line for line in found.console)
    assert "Best against baseline" in found.document


WIDTHS = (390, 700, 1200)
LEAST_CONTRAST = 4.5


def contrast_of(letters: str, ground: str) -> float:
    """The contrast of two colours, written as `rgb(R, G, B)`."""
    pair = [tuple(int(part) / 255 for part in re.findall(r"\d+", words)) for words in (letters, ground)]
    assert [len(parts) for parts in pair] == [3, 3], "letters and grounds are opaque"
    first, second = ((red, green, blue) for red, green, blue in pair)
    return contrast(first, second)


def hard_to_read(measured: Measured) -> list[tuple[str, str, str]]:
    return [letters for letters in measured.letters if contrast_of(*letters[1:]) < LEAST_CONTRAST]


def test_letters_on_every_shade_can_be_read_in_a_dark_browser(tmp_path: Path) -> None:
    """Of schedules in chunks, with split backwards and full ones; light pages are measured below."""
    orders = (
        named("zb-v", num_devices=2, num_microbatches=4),
        named("interleaved", num_devices=2, num_microbatches=4, num_chunks=4),
    )
    drawn = [
        timeline(order, simulate(order, unit_costs(order)), label="A schedule") or "" for order in orders
    ]
    pictures = [Picture(heading="A schedule", svg=svg, caption="") for svg in drawn]
    markup = page(history(), replace(EXTRAS, timelines=pictures))
    measured = measure_page(markup, width=1200, folder=tmp_path, dark=True)
    grounds = {ground for _, _, ground in measured.letters}
    assert len(grounds) == 2 + 3 * 2 + 2 * 4 - 2, "paper, panel, shades; first and last of F are the same"
    assert hard_to_read(measured) == []
    assert contrast_of("rgb(255, 255, 255)", "rgb(46, 148, 87)") < LEAST_CONTRAST, "white on W"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_phone_shows_the_charts_and_a_trials_speed(width: int, tmp_path: Path) -> None:
    measured = measure_page(whole(history()), width=width, folder=tmp_path)
    assert measured.page_width <= width, "the page itself is not moved sideways"
    charts = {chart.split()[0] for _, _, chart in measured.texts}
    assert charts >= {"Seconds", "Speedup", "Objective", "Parameter", "Predicted", "Peak", "Simulated"}
    small = [(words, size, chart) for words, size, chart in measured.texts if size < 9.0]
    assert not small
    assert hard_to_read(measured) == []
    ends = {head: right for head, _, right in measured.columns}
    assert max(ends["trial"], ends[SECONDS_HEAD], ends[SPEEDUP_HEAD]) <= width


def test_a_keyboard_and_a_screen_reader_reach_what_is_moved_sideways(tmp_path: Path) -> None:
    measured = measure_page(whole(history()), width=390, folder=tmp_path)
    assert {label for label, _, _ in measured.scrolled} >= {"Every trial", "Timeline of the best plan"}
    assert {tab_index for _, tab_index, _ in measured.scrolled} == {0}
    cut = whole(history()).replace(' tabindex="0"', "")
    assert {tab_index for _, tab_index, _ in measure_page(cut, width=390, folder=tmp_path).scrolled} == {-1}


def test_what_can_be_moved_sideways_has_shadows_at_its_edges(tmp_path: Path) -> None:
    """A shadow at each edge, and a cover of it that moves away with the content."""
    measured = measure_page(whole(history()), width=390, folder=tmp_path)
    assert measured.scrolled
    assert {kinds for _, _, kinds in measured.scrolled} == {"local, local, scroll, scroll"}


def of_every_trial(measured: Measured) -> list[tuple[str, int]]:
    return [(words, lines) for words, lines, table in measured.cells if table == "Every trial"]


def test_cells_of_every_trial_are_one_line_on_a_phone(tmp_path: Path) -> None:
    run = history(trials=(*history().trials, row(7, 0.5, plan=MANY_STAGES)))
    measured = measure_page(whole(run), width=390, folder=tmp_path)
    cells = of_every_trial(measured)
    splits = {words: lines for words, lines in cells if "+" in words}
    assert {"6+2", "3+2+2+1"} < set(splits)
    broken = {words: lines for words, lines in cells if lines > 1}
    long = MANY_STAGES.split.label
    assert set(broken) == {long}
    assert 1 < broken[long] <= -(-len(long) // PIECE)
    cut = whole(run).replace("td.plain { white-space: nowrap; }", "")
    unstyled = of_every_trial(measure_page(cut, width=390, folder=tmp_path))
    assert sum(lines > 1 for _, lines in unstyled) > len(broken)


def test_it_is_drawn_in_light_and_in_dark_and_prints(tmp_path: Path) -> None:
    """With QUARTET_TEST_PICTURES=FOLDER the pictures are kept there: light, dark, of three widths, and a PDF.

    `make test` draws the widest alone, and keeps nothing.
    """
    folder = pictures_folder(tmp_path)
    path = folder / "report.html"
    path.write_text(whole(history()), encoding="utf-8")
    for width in WIDTHS[-1:] if folder == tmp_path else WIDTHS:
        light, dark = (folder / f"report-{width}-{name}.png" for name in ("light", "dark"))
        height = 4000 if width == WIDTHS[-1] else 9000
        picture(path, to=light, width=width, height=height)
        picture(path, to=dark, width=width, height=height, dark=True)
        assert light.read_bytes().startswith(b"\x89PNG")
        assert light.read_bytes() != dark.read_bytes()
    print_page(path, to=folder / "report.pdf")
    assert (folder / "report.pdf").read_bytes().startswith(b"%PDF")


def test_a_picture_from_elsewhere_keeps_its_place() -> None:
    made = page(history(), Extras(timelines=[Picture(heading="A & B", svg="<svg></svg>", caption="<c>")]))
    assert "<h2>A &amp; B</h2>" in made
    assert "&lt;c&gt;" in made


def test_what_limits_cut_off_stands_beside_the_regret() -> None:
    plain = page(history(), Extras())
    assert "too large to predict every plan" not in plain
    cut = replace(history(), limits=("mappings: 8 slots; for 2 layouts", *ATTACKS[:1]))
    text = page(cut, Extras())
    assert "The space was too large to predict every plan: mappings: 8 slots; for 2 layouts" in text
    assert "<script>" not in text
