from __future__ import annotations

import json
import random
import re
import struct
import subprocess
import sys
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest

from atoll.observe.plots import (
    Curve,
    CurveChart,
    HeatMap,
    Lane,
    LaneChart,
    LaneMark,
    LaneSegment,
    Picture,
    TimeChart,
    TimeSeries,
    check_plot_path,
    write_picture,
)
from atoll.observe.plots.html import drawn
from atoll.observe.plots.pictures import KINDS, MOST, fitted, gathered, merged, noted, pooled
from atoll.observe.plots.style import decimal_ticks, heat_range, ink_on_heat, see_through, step_of, strokes, unit_of
from atoll.protocol.errors import ConfigError

NAN = float("nan")
PROBE = (
    "import sys, atoll.observe.plots; print(sorted({'plotly', 'matplotlib'} & {m.split('.')[0] for m in sys.modules}))"
)


def heat(**changes: Any) -> HeatMap:
    fields: dict[str, Any] = {
        "title": "Goodput",
        "note": "Constants: by hand.",
        "columns": ("150k", "300k"),
        "rows": ("data-parallel", "decoupled, M = 8"),
        "values": ((0.31, None), (0.884, NAN)),
        "spreads": ((0.01, None), (0.0042, 0.1)),
        "column_label": "chips",
        "row_label": "method",
    }
    return HeatMap(**{**fields, **changes})


def curves(lines: int = 3) -> CurveChart:
    points = ((0.1, 0.2), (1.0, 0.625), (10.0, NAN), (300.0, 1.0))
    crowd = tuple(Curve(f"line {number}", points) for number in range(lines))
    return CurveChart("Utilization", "Constants: by hand.", crowd, "bandwidth in Gbit/s", "compute utilization")


def lane(name: str, stretches: int, length_s: float = 10.0) -> Lane:
    """Every kind in turn, and a failure at the start of each."""
    kinds = [KINDS[number % len(KINDS)] for number in range(stretches)]
    done = tuple(LaneSegment(n * length_s, (n + 1) * length_s, kind, 0.5 + n % 2 / 2) for n, kind in enumerate(kinds))
    return Lane(name, done, tuple(LaneMark(stretch.start_s, "a slice failed") for stretch in done))


def lanes(count: int = 2, stretches: int = 2 * len(KINDS)) -> LaneChart:
    crowd = tuple(lane(f"learner-{number}", stretches) for number in range(count))
    return LaneChart("A day", "Constants: by hand.", crowd)


def restless(name: str, stretches: int, chance: random.Random) -> Lane:
    """Kinds and lengths without a pattern."""
    ends = list(accumulate((chance.expovariate(0.01) for _ in range(stretches)), initial=0.0))
    done = tuple(LaneSegment(start, end, chance.choice(KINDS), chance.random()) for start, end in pairwise(ends))
    return Lane(name, done, tuple(LaneMark(stretch.start_s, "a slice failed") for stretch in done))


def page(picture: Picture, folder: Path) -> str:
    write_picture(picture, folder / "picture.html")
    return (folder / "picture.html").read_text()


def without_library(text: str) -> str:
    """The page but for the script of plotly."""
    scripts = re.findall(r"<script>.*?</script>", text, re.DOTALL)
    assert len(scripts) == 2 and "plotly.js" in scripts[0][:200] and len(scripts[0]) > 1_000_000
    return text.replace(scripts[0], "")


def traces(text: str) -> list[dict[str, Any]]:
    found = re.search(r"^const data = (.*);$", without_library(text), re.MULTILINE)
    assert found
    decoded: list[dict[str, Any]] = json.loads(found[1])
    return decoded


@pytest.mark.parametrize("picture", [heat(), curves(), lanes()])
def test_a_page_holds_all_it_needs(picture: Picture, tmp_path: Path) -> None:
    rest = without_library(page(picture, tmp_path))
    assert not re.search(r"https?:|\bsrc=|<link|@import|url\(", rest)
    assert "default-src 'none'" in rest
    assert '<html lang="en">' in rest and f"<title>{picture.title}</title>" in rest and picture.note in rest


@pytest.mark.parametrize("picture", [heat(), curves(), lanes()])
def test_no_button_of_a_page_sends_the_figure_away(picture: Picture, tmp_path: Path) -> None:
    found = re.search(r"^const settings = .* modeBarButtons: \[(.*)\]};$", page(picture, tmp_path), re.MULTILINE)
    assert found and {"toImage"} <= set(json.loads(found[1])) <= {"toImage", "zoom2d", "pan2d", "resetScale2d"}


@pytest.mark.parametrize("picture", [heat(), curves(), curves(0), lanes(), lanes(0), lanes(2, 0)])
def test_an_image_is_a_png_of_a_sane_size(picture: Picture, tmp_path: Path) -> None:
    write_picture(picture, tmp_path / "picture.png")
    data = (tmp_path / "picture.png").read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82")
    assert width == 1600 and 200 < height < 1600
    assert len(data) < 500_000
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


@pytest.mark.parametrize("picture", [curves(0), lanes(0), lanes(2, 0)])
def test_an_empty_picture_is_still_a_page(picture: Picture, tmp_path: Path) -> None:
    assert picture.title in page(picture, tmp_path)


def test_a_heat_map_shows_shares_in_percent_and_leaves_out_what_is_not_known(tmp_path: Path) -> None:
    text = page(heat(), tmp_path)
    (trace,) = traces(text)
    assert trace["z"] == [[31.0, None], [88.4, None]]
    assert trace["customdata"][1] == [
        "decoupled, M = 8<br>150k<br><b>88.40 % ± 0.42 %</b>",
        "decoupled, M = 8<br>300k<br><b>–</b>",
    ]
    shown = re.search(r"^const layouts = (.*);$", text, re.MULTILINE)
    assert shown
    layouts = json.loads(shown[1])
    for scheme in ("light", "dark"):
        assert [cell["text"] for cell in layouts[scheme]["annotations"]] == ["31 %", "–", "88 %", "–"]
    assert layouts["light"]["paper_bgcolor"] != layouts["dark"]["paper_bgcolor"]


def test_a_heat_map_may_come_without_spreads(tmp_path: Path) -> None:
    assert "±" not in without_library(page(heat(spreads=()), tmp_path))


@pytest.mark.parametrize("changes", [{"values": ((0.5, 0.5),)}, {"spreads": ((0.1,), (0.1,))}, {"rows": ()}])
def test_a_heat_map_has_a_cell_for_every_row_and_column(changes: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        heat(**changes)


def test_curves_have_a_gap_where_there_is_no_figure(tmp_path: Path) -> None:
    drawn = traces(page(curves(), tmp_path))
    assert [trace["name"] for trace in drawn] == ["line 0", "line 1", "line 2"]
    assert drawn[0]["x"] == [0.1, 1.0, 10.0, 300.0] and drawn[0]["y"] == [20.0, 62.5, None, 100.0]


@pytest.mark.parametrize("points", [((0.0, 0.5),), ((1.0, 88.0),)])
def test_a_line_refuses_what_its_axes_cannot_show(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(AssertionError):
        Curve("line", points)


def test_thirty_lines_can_be_told_apart() -> None:
    assert len(set(strokes(curves(30).lines))) == 30


def test_neighbouring_lines_differ_in_colour_and_dash() -> None:
    first, second = strokes(curves(2).lines)
    assert first.colour != second.colour and first.dash != second.dash


def test_a_family_shares_its_colour_and_every_family_has_the_same_dashes() -> None:
    drawn = strokes([Curve(f"{family}{step}", (), family) for family in ("a", "b") for step in (1, 10)])
    assert drawn[0].colour == drawn[1].colour != drawn[2].colour == drawn[3].colour
    assert drawn[0].dash == drawn[2].dash != drawn[1].dash == drawn[3].dash


def test_a_timeline_has_one_trace_per_kind_and_one_for_failures(tmp_path: Path) -> None:
    drawn = {trace["name"]: trace for trace in traces(page(lanes(), tmp_path))}
    whole = LaneChart("", "", (Lane("a", (LaneSegment(0, 5, "stepping"), LaneSegment(5, 6, "stepping", 0.75))),))
    assert set(drawn) == {"stepping, slices missing", *KINDS, "failure"}
    first, every = KINDS.index("outage") * 10 / 60, len(KINDS) * 10 / 60  # in minutes: the chart is over three long
    assert drawn["outage"]["y"] == [0, 0, 1, 1]
    assert drawn["outage"]["base"] == pytest.approx([first, first + every] * 2, abs=1e-5)
    assert drawn["outage"]["x"] == pytest.approx([10 / 60] * 4, abs=1e-5)
    assert drawn["failure"]["text"][1] == "learner-0, 0:10<br>a slice failed"
    full, part = traces(page(whole, tmp_path))
    assert full["marker"]["color"] == "#0072B2" and part["marker"]["color"] == [see_through("#0072B2", 0.75)]


def test_marks_have_a_sign_for_each_name_and_good_ones_stand_at_the_foot(tmp_path: Path) -> None:
    marks = (
        LaneMark(1, "it died", "killed"),
        LaneMark(2, "it is back", "restarted", good=True),
        LaneMark(3, "no", "refused"),
    )
    drawn = traces(page(LaneChart("", "", (Lane("a", (LaneSegment(0, 5, "stepping"),), marks),)), tmp_path))[1:]
    assert [trace["name"] for trace in drawn] == ["killed", "restarted", "refused"]
    assert [trace["y"] for trace in drawn] == [[-0.38], [0.38], [-0.38]]
    assert len({trace["marker"]["symbol"] for trace in drawn}) == 3


def test_a_course_is_drawn_in_the_unit_of_its_time_and_leaves_gaps() -> None:
    trails = (
        TimeSeries("a", ((0.0, 0.5), (300.0, NAN), (600.0, 1.0)), dots=True),
        TimeSeries("b", ((0.0, 1.0),), steps=True),
    )
    course = drawn(TimeChart("Participation", "", trails, "share", shares=True, end_s=1200.0))
    first, second = course.data
    assert first["x"] == [0.0, 5.0, 10.0] and first["y"] == [50.0, None, 100.0]
    assert first["mode"] == "lines+markers" and second["line"]["shape"] == "hv"
    assert course.layout["xaxis"]["title"]["text"] == "time in minutes" and course.layout["xaxis"]["range"] == [0, 20]
    assert course.layout["yaxis"]["ticksuffix"] == " %"


def test_thousands_of_stretches_give_few_traces_and_a_bounded_page(tmp_path: Path) -> None:
    chance = random.Random(7)
    crowd = tuple(restless(f"learner-{number}", 300, chance) for number in range(64))
    text = page(LaneChart("A day", "Constants: by hand.", crowd), tmp_path)
    drawn = traces(text)
    assert len(drawn) <= len(KINDS) + 2
    assert 1000 < sum(len(trace["x"]) for trace in drawn if trace["type"] == "bar") <= MOST
    assert len(without_library(text)) < 2_000_000
    assert re.search(r"Constants: by hand\. Stretches under [\w ]+ are drawn together\.", text)


def test_a_timeline_that_fits_is_shown_whole() -> None:
    shown, grain_s = fitted(lanes())
    assert (shown, grain_s) == (lanes(), 0.0)


def test_the_note_says_what_is_drawn_together() -> None:
    together = "Stretches under 30 s are drawn together."
    assert [noted(note, 30.0) for note in ("", "by hand", "by hand.")] == [together, *[f"by hand. {together}"] * 2]
    assert noted("by hand", 0.0) == "by hand"


def test_fitting_ends_when_there_are_more_lanes_than_stretches_to_show() -> None:
    shown, _ = fitted(lanes(5, 8), most=3)
    assert [len(lane.stretches) for lane in shown.lanes] == [1] * 5


def test_neighbours_that_are_the_same_become_one() -> None:
    parts = [
        LaneSegment(0, 1, "stepping"),
        LaneSegment(1, 2, "stepping"),
        LaneSegment(2, 2, "gone"),
        LaneSegment(2, 3, "stepping", 0.5),
    ]
    apart = [LaneSegment(4, 5, "stepping", 0.5)]
    assert merged([*parts, *apart]) == (LaneSegment(0, 2, "stepping"), parts[-1], *apart)


def test_a_short_outage_between_long_stretches_is_kept() -> None:
    parts = [LaneSegment(0, 50, "stepping"), LaneSegment(50, 51, "outage"), LaneSegment(51, 99, "stepping")]
    assert pooled(parts, 10.0) == parts


def test_short_stretches_side_by_side_keep_their_mean() -> None:
    parts = [LaneSegment(0, 4, "stepping"), LaneSegment(4, 6, "outage"), LaneSegment(6, 8, "stepping", 0.5)]
    assert pooled(parts, 10.0) == [LaneSegment(0, 8, "stepping", 5 / 8)]
    assert pooled([LaneSegment(0, 1, "stepping"), LaneSegment(1, 3, "gone")], 10.0) == [LaneSegment(0, 3, "gone")]


def test_marks_of_one_grain_become_one_that_says_so() -> None:
    marks = [LaneMark(9.0, "c"), LaneMark(1.0, "a"), LaneMark(3.0, "b")]
    assert gathered(marks, 5.0) == (LaneMark(1.0, "a, and 1 more within 2.0 s"), LaneMark(9.0, "c"))


def test_a_name_cannot_end_the_script_or_the_title(tmp_path: Path) -> None:
    nasty = "</script></title><b>$a$"
    picture = CurveChart(nasty, nasty, (Curve(nasty, ((1.0, 0.5),)),), nasty, nasty)
    rest = without_library(page(picture, tmp_path))
    assert rest.count("</script>") == 1 and rest.count("</title>") == 1 and "<b>$" not in rest
    write_picture(picture, tmp_path / "picture.png")


@pytest.mark.parametrize("name", ["picture.svg", "picture", "picture.PNG.gz"])
def test_another_suffix_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"write FILE\.html or FILE\.png$"):
        write_picture(heat(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", ["html", "png"])
@pytest.mark.parametrize(
    ("name", "fact"),
    [("none/picture", "does not exist"), ("folder", "is a folder"), ("x" * 300, "cannot be written")],
)
def test_a_place_that_cannot_be_written_to_is_told_in_one_line(
    name: str, fact: str, suffix: str, tmp_path: Path
) -> None:
    (tmp_path / f"folder.{suffix}").mkdir()
    with pytest.raises(ConfigError, match=fact) as raised:
        write_picture(heat(), tmp_path / f"{name}.{suffix}")
    assert "\n" not in str(raised.value) and str(raised.value).startswith("--plot ")


def test_a_locked_folder_is_known_before_anything_is_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_plot_path(tmp_path / "picture.png")
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write anywhere
    with pytest.raises(ConfigError, match="may not be written to"):
        check_plot_path(tmp_path / "picture.png")


def test_the_libraries_are_not_imported_before_a_picture_is_drawn() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_ticks() -> None:
    assert decimal_ticks(0.1, 300.0) == pytest.approx([0.1, 0.3, 1, 3, 10, 30, 100, 300])
    assert decimal_ticks(1.0, 10.0) == pytest.approx([1, 2, 5, 10])
    assert [(unit_of(end_s).name, step_of(end_s)) for end_s in (0, 100, 3600, 86400, 604800)] == [
        ("seconds", 1),
        ("seconds", 10),
        ("minutes", 5),
        ("hours", 2),
        ("days", 1),
    ]


def test_the_heat_scale_spans_the_values_and_its_text_stands_out() -> None:
    assert heat_range([0.44, 0.881]) == (0.4, 0.9)
    assert heat_range([1.0]) == (1.0, 1.1) and heat_range([]) == (0.0, 1.0)
    assert ink_on_heat(0.4, 0.4, 0.9) == "#1C2126" and ink_on_heat(0.9, 0.4, 0.9) == "#FFFFFF"
