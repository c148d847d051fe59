"""The report page: it says what the records say, needs no network, and its view of the tokens works from a keyboard."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import browser
import pytest
from sample_record import make_record
from typer.testing import CliRunner

from figures import composed
from figures.webpage import __main__ as command
from figures.webpage import data, images, page, tokens
from kvnotes import discover, records
from kvnotes.records import Instance, Record, RecordError, Table

REAL = discover.ROOT / "results"
SPANS = {
    "text": ((0, 2), (3, 4)),
    "field": ((2, 3),),
    "delimiter": ((4, 5), (6, 7)),
    "action.target": ((5, 6),),
    "answer_prefix": ((7, 8),),
}
# Base and target margins are -4 and 4, so a margin of 8 R - 4 is a recovery of R; downstream are positions 3 to 6.
SUFFIX = {
    "single": [-4.0, 0.0, 4.0, -4.8],
    "notes": 4.0,
    "without": [4.0, 0.0, 2.0, 4.0],
    "map": [[-4.0, -2.0, -4.0, -4.0], [-4.0, -4.0, 2.0, -4.0]],
}
# Two layers of four heads over two KV heads.
HEADS = {
    "per_layer": {"heads": 4, "kv_heads": 2},
    "single": [-4.0, 0.0, 4.0, -4.8],
    "notes": 4.0,
    "alone": [-4.0, -3.2, -4.0, -4.0, -4.0, -4.0, 0.0, -4.0],
    "kv": [-4.0, -2.4, -4.0, -4.0],
    "attributed": {"base": {"heads": [0.0] * 8}, "target": {"heads": [0.0] * 6 + [1.6, 0.0]}},
    "estimates": {"delimiter[0]": [0.0, 0.8, 0.4, 0.0, 0.0, 0.0, -1.6, 0.0], "write_all": [0.0] * 8},
    "attention": {
        "heads": {"aggregator": [0.0] * 6 + [0.61, 0.0], "action": [0.1] * 8},
        "named": {"1.2": {"aggregator": 0.61, "action": 0.1, "itself": 0.2}},
        "random": {"aggregator": 0.05, "action": 0.1, "itself": 0.7},
    },
}
CELLS = ("R", "low", "high", "p", "ungated")
TABLES = {
    "suffix": {
        "by slot": Table(
            columns=("slot", *(f"{kind} {cell}" for kind in ("alone", "lost") for cell in CELLS)),
            rows=[["delimiter[0]", 0.45, 0.37, 0.55, 0.003, 0.46, 0.41, 0.34, 0.48, 0.0001, 0.4]],
        ),
        "by layer": Table(
            columns=("layer", *(f"alone {cell}" for cell in CELLS)), rows=[["1", 0.7, 0.6, 0.8, 0.02, 0.7]]
        ),
    },
    "heads": {
        "read heads": Table(
            columns=("head", *(f"{kind} {cell}" for kind in ("direct", "alone") for cell in CELLS)),
            rows=[["1.2", 0.2, 0.1, 0.3, 0.01, 0.2, 0.33, 0.25, 0.41, 0.001, 0.3]],
        ),
        "attention of the read heads": Table(
            columns=("head", "pairs", "itself", "aggregator"), rows=[["1.2", 4, 0.2, 0.61], ["at random", 4, 0.7, 0.05]]
        ),
    },
}
WORDS = {1: "<s>", 5: " state", 7: ":", 8: " approve", 9: '{"', 13: "\n", 100: " deny", 101: " approve"}


def record(study: str, measures: dict[str, Any], *, model: str = "tiny-model", words: bool = True) -> Record:
    """A record of one layout by hand, every measured instance alike."""
    made = make_record(model=model, included=4, gated=1)

    def filled(one: Instance) -> Instance:
        return one if one.tokens is None else one.model_copy(update={"measures": measures, "spans": SPANS})

    instances = tuple(map(filled, made.instances))
    texts = {str(i): WORDS.get(i, f" v{i}") for i in records.token_ids(instances)} if words else {}
    summary = made.summary.model_copy(update={"tables": TABLES[study], "effects": ()})
    return made.model_copy(
        update={"study": study, "instances": instances, "summary": summary, "vocabulary": texts, "title": study}
    )


def put(results: Path, made: Record, folder: str = "") -> Path:
    path = results / (folder or made.model.name) / made.study / "table_field_first.json"
    records.write(made, path)
    return path


@pytest.fixture
def results(tmp_path) -> Path:
    """A model with records of three studies, one without an included pair, a planted one, one of another schema."""
    folder = tmp_path / "results"
    put(folder, make_record())
    put(folder, record("suffix", SUFFIX))
    put(folder, record("heads", HEADS))
    put(folder, make_record(model="weak", included=0))
    put(folder, record("suffix", SUFFIX, model="weak").model_copy(update=_nothing_included()))
    planted = make_record(model="planted-notes")
    source = planted.model.model_copy(update={"source": "kvnotes.planted, weights set by hand"})
    put(folder, planted.model_copy(update={"model": source}))
    older = put(folder, make_record(model="older"))
    older.write_text(older.read_text().replace('"schema_version": 1', '"schema_version": 0'))
    return folder


def _nothing_included() -> dict[str, Any]:
    made = make_record(model="weak", included=0, gated=5)
    instances = tuple(
        one if one.tokens is None else one.model_copy(update={"measures": SUFFIX, "spans": SPANS})
        for one in made.instances
    )
    return {"instances": instances, "inclusion": records.count_inclusion(instances), "vocabulary": {}}


class Text(HTMLParser):
    """The page's text, and its attributes by tag."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self._hidden = 0
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag):
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data):
        if not self._hidden:
            self.parts.append(data)

    @property
    def words(self) -> str:
        return " ".join("".join(self.parts).split())


def rendered(results: Path, *models: str) -> str:
    return page.render(data.load(results, models))


# --- what it says -------------------------------------------------------------------------------------------


def test_every_study_stands_in_the_summary_with_its_interval_and_n_or_a_sentence(results):
    words = Text(rendered(results, "tiny-model")).words
    assert "locality table_field_first field-only 0.05 [\N{MINUS SIGN}0.03, 0.13] 4 (2)" in words
    assert "notes-only 0.95 [0.87, 1.03] 4 (2)" in words
    for study in {*discover.studies()} - {"locality", "suffix", "heads"}:
        assert f"No record: run make probe-{study} MODEL=tiny-model." in words
    assert data.studies()[0] == "locality"
    assert {*data.studies()} == {*discover.studies()}


def test_the_named_effects_are_those_of_the_committed_records():
    for path in sorted(REAL.glob("*/*/table_field_first.json")):
        made = json.loads(path.read_text())
        if made["inclusion"]["included"]:
            named = {one["name"] for one in made["summary"]["effects"]}
            assert data.headline(made["study"]), path
            assert {*data.headline(made["study"])} <= named, path


def test_a_headline_is_what_the_studys_module_says():
    assert data.headline("heads") == tuple(discover.study("heads").HEADLINE)
    assert data.headline("locality") == ("field_only", "notes_only", "field_share")  # whose module says none
    assert [name for name in data.STUDIES if hasattr(discover.study(name), "HEADLINE") and data.STUDIES[name]] == []


def test_limits_of_a_number_stand_in_its_row(results):
    made = make_record(model="limited")
    limits = {"unresolved": True, "warning": "only 8 clusters: true coverage can lie below 0.95"}
    effects = (made.summary.effects[0].model_copy(update=limits), *made.summary.effects[1:])
    put(results, made.model_copy(update={"summary": made.summary.model_copy(update={"effects": effects})}))
    words = Text(rendered(results, "limited")).words
    test = "equivalent to 0 within 0.1 (equivalence (TOST))"
    assert f"field-only 0.05 [\N{MINUS SIGN}0.03, 0.13] 4 (2) {test} unresolved {limits['warning']} notes-only" in words


# --- what is not to be drawn --------------------------------------------------------------------------------


def untrusted(results: Path, made: Record, folder: str, study: str = "locality") -> str:
    """Put a record into a study's folder that must not be drawn; returns its page's words."""
    records.write(made, results / folder / study / "table_field_first.json")
    return Text(rendered(results, folder)).words


def test_a_record_with_a_failed_check_is_not_drawn(results):
    check = make_record().checks[1].model_copy(update={"value": 0.3, "passed": False})
    made = make_record(model="failed")
    words = untrusted(results, made.model_copy(update={"checks": (check,)}), "failed")
    why = "a check failed: identity is 0.3, bound 0.0001. Run make probe-locality again."
    assert f"These numbers cannot be trusted: {why}" in words
    assert f"Not drawn: {why}" in words
    shelf = data.load(results, ["failed"])
    assert [one.url for one in images.of_model(*shelf)] == [""]
    assert images.side_by_side(shelf) == []  # nothing to put side by side


def test_a_composed_page_says_of_a_record_that_it_is_not_drawn_and_not_that_it_was_not_run(results, monkeypatch):
    seen = {}
    monkeypatch.setattr(composed, "figure", lambda page, models: seen.setdefault(page.name, models) and None)
    shelf = data.load(results, ["older", "tiny-model"])
    images.side_by_side(shelf)
    assert seen["fig3"]["older"]["locality"].startswith("schema_version 0 is older than 1")
    assert isinstance(seen["fig3"]["tiny-model"]["locality"], Record)


def test_a_record_in_another_studys_folder_is_neither_drawn_nor_shown(results):
    words = untrusted(results, record("suffix", SUFFIX, model="moved"), "moved", "heads")
    why = "it is a record of another study, suffix: move it to that study's folder."
    assert f"These numbers cannot be trusted: {why}" in words
    assert f"moved/heads/table_field_first is not shown: {why}" in words
    assert f"Not drawn: {why}" in words


@pytest.mark.parametrize("error", [RuntimeError("r"), AssertionError("a"), StopIteration("s")])
def test_no_error_of_a_figure_or_a_view_stops_the_page(results, monkeypatch, error):
    def fail(*given, **more):
        raise error

    monkeypatch.setattr(images.build, "draw", fail)
    monkeypatch.setattr(tokens, "view", fail)
    monkeypatch.setattr(composed, "figure", fail)
    words = Text(rendered(results, "tiny-model")).words
    why = f"{type(error).__name__} while drawing it: {error}. Run make"
    assert words.count(f"Not drawn: {why} probe-") == 3
    assert words.count(f"Not drawn: {why} figures again.") == 4  # figures 3 and 15, tables 3 and 5 have records
    assert f"tiny-model/suffix/table_field_first is not shown: {why} probe-suffix again." in words


def test_what_shows_several_models_and_cannot_be_drawn_says_so(results, monkeypatch):
    drawn = images.build.draw

    def draw(study, found):
        if len(found) > 1:
            raise KeyError("no place")
        return drawn(study, found)

    monkeypatch.setattr(images.build, "draw", draw)
    together = images.side_by_side(data.load(results, ["tiny-model", "weak"]))
    said = {one.name: one.said for one in together if one.said}
    why = "KeyError while drawing it: 'no place'. Run `make probe-{}` again."
    assert said == {f"{study}/side-by-side": f"Not drawn: {why.format(study)}" for study in ("locality", "suffix")}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("weak", "No pair passes the competence gate, of 2 used and 3 generated, so there is no recovery to report."),
        ("weak", "weak/suffix/table_field_first has no pair that passes the competence gate"),
        ("planted-notes", "A planted model: its mechanism was set by hand"),
        ("planted-notes", "No record of suffix or heads, which measure single tokens"),
        ("older", "This record cannot be read: schema_version 0 is older than 1"),
        ("older", "Not drawn: schema_version 0 is older than 1"),
        ("never-run", "There is no record to draw."),
        ("never-run", "No record: run make probe-locality MODEL=never-run."),
    ],
)
def test_what_cannot_be_shown_is_said(results, model, said):
    assert said in Text(rendered(results, model)).words


def test_a_record_that_lacks_what_its_figure_or_the_view_shows_says_so(results):
    put(results, make_record(model="other").model_copy(update={"study": "suffix"}))
    words = Text(rendered(results, "other")).words
    assert "Not drawn: KeyError while drawing it: " in words
    again = "Run make probe-suffix again."
    assert f"other/suffix/table_field_first is not shown: KeyError while drawing it: 'single'. {again}" in words


def test_a_text_among_the_shares_of_attention_is_shown_as_it_is(results):
    made = record("heads", HEADS, model="odd")
    columns = ("head", "pairs", "itself", "aggregator")
    table = Table(columns=columns, rows=[["1.2", 4, "unknown", 0.615], ["1.3", 4, None, -0.001]])
    tables = made.summary.tables | {"attention of the read heads": table}
    put(results, made.model_copy(update={"summary": made.summary.model_copy(update={"tables": tables})}))
    html = rendered(results, "odd")
    (body,) = re.findall(r'<table class="attention">.*?<tbody>(.*?)</tbody>', html, re.DOTALL)
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t", body)
    assert cells == ["1.2", "4", "unknown", "0.61", "1.3", "4", "", "0.00"]  # 0.615 is a little less in binary
    assert [own["style"] for tag, own in Text(html).attributes if tag == "td" and own.get("style")] == [
        "--s: 0.615",
        "--s: -0.001",
    ]


def test_no_results_is_one_line(tmp_path):
    with pytest.raises(RecordError, match="no such results folder"):
        data.load(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordError, match="holds no record"):
        data.load(tmp_path / "empty")


def test_models_are_all_planted_ones_last_or_those_asked_for_in_their_order(results):
    assert [one.folder for one in data.load(results)] == ["older", "tiny-model", "weak", "planted-notes"]
    assert [one.folder for one in data.load(results, ["weak", "older"])] == ["weak", "older"]


def test_figures_have_words_and_a_size(results):
    found = [own for tag, own in Text(rendered(results, "tiny-model")).attributes if tag == "img"]
    assert found
    for own in found:
        assert str(own["src"]).startswith("data:image/webp;base64,")
        assert len(str(own["alt"])) > 40
        assert int(str(own["width"])) > 400
    assert "tiny-model, layout table_field_first. 4 of 6 pairs included." in str(found[0]["alt"])


def test_nothing_in_a_record_becomes_markup(results):
    evil = '"></script><script>alert(1)</script><img src=x onerror=alert(1)>'
    made = record("suffix", SUFFIX, model="evil")
    texts = dict.fromkeys(made.vocabulary, evil)
    put(results, made.model_copy(update={"title": evil, "vocabulary": texts}))
    html = rendered(results, "evil")
    found = Text(html)
    assert [own for _, own in found.attributes if "onerror" in own or own.get("src") == "x"] == []
    assert [own.get("type") for tag, own in found.attributes if tag == "script"] == ["application/json", None]
    (held,) = json.loads(re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', html)[0])
    assert set(held["words"].values()) == {evil}


def test_the_page_asks_for_nothing_but_itself(results):
    html = rendered(results)
    for tag, own in Text(html).attributes:
        for name in ("src", "href"):
            if (value := own.get(name)) is not None:
                assert value.startswith(("#", "data:")), (tag, value[:80])
    assert "default-src 'none'" in html
    assert "@import" not in html
    assert "url(" not in html


def test_the_same_records_give_the_same_bytes(results, tmp_path):
    made = []
    for seed in ("1", "2"):
        out = tmp_path / f"{seed}.html"
        asked = [sys.executable, "-m", "figures.webpage", str(results), "--model", "tiny-model", "--out", str(out)]
        subprocess.run(asked, check=True, cwd=discover.ROOT, env={"PYTHONHASHSEED": seed}, capture_output=True)
        made.append(out.read_bytes())
    assert made[0] == made[1]


def test_the_command_says_what_it_wrote_and_where(results, tmp_path):
    out = tmp_path / "deep" / "report.html"
    done = CliRunner().invoke(command.app, [str(results), "--model", "older", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"{out} (0.0 MB)")
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    missing = CliRunner().invoke(command.app, [str(tmp_path / "none")])
    assert isinstance(missing.exception, RecordError)


def test_make_report_names_the_models_only_where_they_are_asked_for():
    def recipe(*more: str) -> str:
        asked = ["make", "-n", "report", *more]
        done = subprocess.run(
            asked, capture_output=True, text=True, check=True, cwd=discover.ROOT, env={"PATH": "/usr/bin:/bin"}
        )
        return done.stdout.splitlines()[-1]

    assert recipe().endswith("-m figures.webpage results")
    assert recipe("MODELS=a b").endswith("-m figures.webpage results --model 'a' --model 'b'")
    assert recipe("RESULTS=r").endswith("-m figures.webpage 'r' --out 'r/figures/report.html'")


def test_make_report_needs_no_torch_where_there_is_no_environment_yet():
    asked = ["make", "--dry-run", "report", "VENV=none-yet"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=discover.ROOT)
    assert "pip install --quiet --constraint constraints.txt --editable .\n" in done.stdout
    assert "[models" not in done.stdout


@pytest.mark.slow
def test_three_models_are_under_five_megabytes():
    assert len(rendered(REAL).encode()) < 5_000_000


# --- what the token view gets -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (0.0546, 546),  # once it was rounded to 0.055 and then to 0.06
        (0.5, 5000),
        (-0.1, -1000),
        (-0.8 / 8 + 1e-17, -1000),
        (0.05501, 551),  # 0.0550 would stand half way between 0.05 and 0.06
        (0.05499, 549),
        (-0.05501, -551),
        (0.06001, 601),
        (0.00004, 1),
        (-0.00004, -1),
        (0.0, 0),
    ],
)
def test_a_number_in_parts_rounds_as_the_number_itself_does(value, parts):
    assert tokens.part(value) == parts
    for places in (2, 3):
        assert f"{parts / 10_000:.{places}f}" == f"{value:.{places}f}"


def test_recoveries_in_ten_thousandths():
    found = tokens.view(record("suffix", SUFFIX))
    assert found is not None
    one = found["pairs"][0]
    assert one["at"] == [3, 4, 5, 6]
    assert one["single"] == [0, 5000, 10000, -1000]
    assert one["lost"] == [0, 5000, 2500, 0]
    assert one["map"] == [[0, 2500, 0, 0], [0, 0, 7500, 0]]
    assert one["kind"] == "field"
    assert one["target"] == {2: 50}
    assert one["owner"][4:] == ["delimiter", "action.target", "delimiter", "answer_prefix"]
    assert found["tables"]["table_field_first"]["alone"] == {"delimiter[0]": [0.45, 0.37, 0.55, 0.003]}
    assert len(found["pairs"]) == 4  # the included ones


def test_heads_by_position_and_at_the_decision():
    found = tokens.view(record("heads", HEADS))
    assert found is not None
    one = found["pairs"][0]
    assert one["estimates"] == {4: [0, 1000, 500, 0, 0, 0, -2000, 0]}
    assert one["layers"] == {4: [1500, -2000]}
    assert one["alone"] == [0, 1000, 0, 0, 0, 0, 5000, 0]
    assert one["kv"] == [0, 2000, 0, 0]
    assert one["direct"] == [0, 0, 0, 0, 0, 0, 2000, 0]
    assert one["attends"]["aggregator"][6] == 6100


def test_a_number_over_pairs_is_the_records_own_and_the_pairs_are_of_its_layout():
    made = record("suffix", SUFFIX)
    other = tuple(
        one.model_copy(update={"id": f"p{at}", "layout": "paper"}) for at, one in enumerate(made.instances[:3])
    )
    row = ["delimiter[0]", 0.4546, 0.37, 0.55, 0.003, 0.46, 0.41, 0.34, 0.48, 0.0001, 0.4]
    table = TABLES["suffix"]["by slot"].model_copy(update={"rows": [row]})
    summary = made.summary.model_copy(update={"tables": {"by slot, paper": table}})
    found = tokens.view(made.model_copy(update={"instances": (*made.instances, *other), "summary": summary}))
    assert found is not None
    assert found["included"] == {"table_field_first": 4, "paper": 3}
    assert found["tables"]["paper"]["alone"] == {"delimiter[0]": [0.4546, 0.37, 0.55, 0.003]}


def test_a_record_without_texts_has_none_and_other_studies_have_no_tokens():
    found = tokens.view(record("suffix", SUFFIX, words=False))
    assert found is not None
    assert found["words"] == {}
    assert tokens.view(make_record()) is None


def test_of_many_pairs_those_with_a_map_stay(monkeypatch):
    monkeypatch.setitem(tokens.MOST, "suffix", 2)
    made = record("suffix", SUFFIX | {"map": []})
    last = made.instances[3].model_copy(update={"measures": SUFFIX})
    made = made.model_copy(update={"instances": (*made.instances[:3], last, *made.instances[4:])})
    found = tokens.view(made)
    assert found is not None
    assert [bool(one.get("map")) for one in found["pairs"]] == [False, True]


# --- in a browser -------------------------------------------------------------------------------------------

TOKEN = "document.querySelector('.view .arm:nth-child({arm}) .token[data-p=\"{p}\"]')"


def token(p: int, arm: int = 1) -> str:
    return TOKEN.format(p=p, arm=arm)


def shares(tab: browser.Page) -> list[float]:
    """How deep each token of the base prompt is coloured, from 0 to 1; below 0 where it leads away."""
    each = "[...document.querySelectorAll('.view .arm:first-child .token')]"
    sign = "(t.classList.contains('away') ? -1 : 1)"
    return tab.js(f"{each}.map(t => {sign} * Number(t.style.getPropertyValue('--s')) + 0)")


def told(tab: browser.Page) -> str:
    return tab.js("document.querySelector('.told').textContent")


def readout(tab: browser.Page) -> str:
    return tab.js("document.querySelector('.readout').textContent")


def choose(tab: browser.Page, control: str, value: int | str) -> None:
    """Set a control and tell the page, as a mouse would."""
    at = f"document.getElementById('model-1-data-{control}')"
    tab.js(f"{at}.value = {json.dumps(value)}")
    for event in ("input", "change"):
        tab.js(f"{at}.dispatchEvent(new Event('{event}'))")


@pytest.fixture
def report(results, tmp_path) -> Path:
    out = tmp_path / "report.html"
    out.write_text(rendered(results), encoding="utf-8")
    return out


@pytest.fixture
def tiny(results, tmp_path) -> Path:
    """The page of the model that has token effects: four pairs of suffix, then four of heads."""
    out = tmp_path / "tiny.html"
    out.write_text(rendered(results, "tiny-model"), encoding="utf-8")
    return out


@browser.needs_browser
def test_it_loads_without_an_error_and_asks_for_nothing(report):
    with browser.page() as tab:
        tab.open(report)
        assert tab.js("document.querySelectorAll('.view .token').length") == 16  # both prompts of one model
        assert tab.js("document.querySelectorAll('img').length") > 0
        assert tab.js("[...document.images].every(i => i.complete && i.naturalWidth == i.getAttribute('width'))")
        assert tab.js("document.documentElement.scrollWidth <= innerWidth")  # nothing is cut off
        tab.open(report, width=420)
        assert tab.js("document.documentElement.scrollWidth <= innerWidth")
        assert tab.errors == []
        assert {url.partition(":")[0] for url in tab.requests} == {"file", "data"}


@browser.needs_browser
def test_the_layer_control_changes_the_shading(tiny):
    with browser.page() as tab:
        tab.open(tiny)
        assert shares(tab) == [0, 0, 0, 0, 0.5, 1, -0.1, 0]
        assert tab.js(f"{token(5, arm=2)}.textContent") == " approve1.00"  # the number stands under the token
        base = tab.js(f"getComputedStyle({token(4)}).backgroundColor")
        choose(tab, "layer", 0)
        assert shares(tab) == [0, 0, 0, 0, 0.25, 0, 0, 0]
        assert tab.js(f"getComputedStyle({token(4)}).backgroundColor") != base
        choose(tab, "layer", 1)
        assert shares(tab) == [0, 0, 0, 0, 0, 0.75, 0, 0]
        assert "R 0.70 [0.60, 0.80], p = 0.020" in readout(tab)
        choose(tab, "layer", -1)
        choose(tab, "edit", "lost")
        assert shares(tab) == [0, 0, 0, 0, 1, 0.5, 0, 0]  # of a scale that ends at 0.5
        assert tab.errors == []


@browser.needs_browser
def test_heads_shade_the_tokens_that_have_an_estimate_and_the_decision(tiny):
    with browser.page() as tab:
        tab.open(tiny)
        choose(tab, "pair", 4)  # the first of heads
        choose(tab, "layer", 0)  # its four heads' estimates add up to 0.15; layer 1 has -0.2, the end of the scale
        assert shares(tab) == [0, 0, 0, 0, 0.75, 0, 0, 0]
        choose(tab, "layer", 1)
        choose(tab, "head", 2)
        assert shares(tab) == [0, 0, 0, 0, -0.4, 0, 0, 1]  # of 0.5, which its z has at the decision
        said = readout(tab)
        assert "Head 1.2: its z alone at the decision, R 0.500 (over pairs 0.33 [0.25, 0.41], p = 0.001)" in said
        assert "attention from the decision: aggregator 0.61, action 0.10" in said
        assert "KV head 1.1, its cells downstream: R 0.000" in said
        tab.js(f"{token(4)}.focus()")
        assert "R \N{MINUS SIGN}0.200 (first order)" in told(tab)
        tab.js(f"{token(5)}.focus()")
        assert "No estimate was kept at this token." in told(tab)
        choose(tab, "layer", 0)
        tab.js("document.querySelector('button[aria-label=\"show head 1.2\"]').focus()")
        tab.press("Enter")
        assert "Head 1.2" in readout(tab)
        assert tab.errors == []


@browser.needs_browser
def test_everything_is_reached_from_the_keyboard(tiny):
    with browser.page() as tab:
        tab.open(tiny)
        tab.press("Tab")
        assert tab.js("document.activeElement.className") == "skip"
        tab.js("document.getElementById('model-1-data-pair').focus()")
        tab.press("Tab", "Tab")  # over the edit to the layer
        assert tab.js("document.activeElement.id") == "model-1-data-layer"
        tab.press("ArrowRight")
        assert shares(tab) == [0, 0, 0, 0, 0.25, 0, 0, 0]
        assert tab.js("document.activeElement.getAttribute('aria-valuetext')") == "0 of 0\N{EN DASH}1"
        tab.press("Home")
        tab.press("Tab", "Tab")  # over the numbers, since a suffix pair has no heads, into the base prompt
        assert tab.js("document.activeElement.dataset.p") == "0"
        assert "Before the change" in told(tab)
        tab.press("ArrowRight", "ArrowRight")
        assert "\u201c v10\u201d \u2192 \u201c v50\u201d (changed), position 2, class field" in told(tab)
        tab.press("ArrowRight", "ArrowRight")
        assert told(tab) == (
            "\u201c\u21b5\u201d, position 4, class delimiter, slot delimiter[0]. This pair: R 0.500. "
            "This slot over pairs: 0.45 [0.37, 0.55], p = 0.003."
        )
        tab.press("]")
        assert "R 0.250" in told(tab)
        tab.press("ArrowLeft", "ArrowLeft", shift=True)  # from layer 0 to all, and no further
        assert "R 0.500" in told(tab)
        tab.press("ArrowRight", shift=True)
        assert "R 0.250" in told(tab)
        tab.press("[", modifiers=browser.CTRL | browser.ALT)  # AltGr, as a keyboard without brackets types it
        assert "R 0.500" in told(tab)
        tab.press("[", "]", modifiers=browser.CTRL)  # the browser's own
        assert "R 0.500" in told(tab)
        tab.press("]", modifiers=browser.ALT)
        assert "R 0.250" in told(tab)
        assert "or Shift with \u2190 and \u2192, change the layer" in tab.js(
            "document.querySelector('.legend').textContent"
        )
        assert tab.js("document.activeElement.getAttribute('aria-label')").endswith("position 4, delimiter, R 0.250")
        tab.press("End")
        assert "Query block" in told(tab)
        tab.press("Tab")
        assert tab.js("document.activeElement.closest('[role=listbox]').getAttribute('aria-label')").startswith(
            "Oracle"
        )
        assert tab.errors == []


@browser.needs_browser
def test_only_a_field_pairs_prompts_are_called_stale_and_oracle(results, tmp_path):
    made = record("suffix", SUFFIX, model="polarity")
    kinds = tuple(one.model_copy(update={"kind": "polarity"}) for one in made.instances)
    put(results, made.model_copy(update={"instances": kinds}))
    found = {}
    for model in ("polarity", "tiny-model"):
        out = tmp_path / "kinds.html"
        out.write_text(rendered(results, model), encoding="utf-8")
        with browser.page() as tab:
            tab.open(out)
            found[model] = tab.js("[...document.querySelectorAll('.arm h4')].map(h => h.firstChild.textContent.trim())")
    assert found == {
        "polarity": ["Base prompt", "Target prompt"],
        "tiny-model": ["Stale prompt (base)", "Oracle prompt (target)"],
    }


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2) of a CSS colour as a browser computes it: rgb(0 to 255) or color(srgb 0 to 1)."""
    scale = 1 if colour.startswith("color(") else 255
    parts = [float(part) / scale for part in re.findall(r"[\d.]+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@browser.needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_a_token_can_be_read_on_every_shade(results, tmp_path, dark):
    made = record("suffix", SUFFIX, model="shades")
    rows = [one for one in made.instances if one.status == "included"]
    # the third token of each pair is the scale's end, so the others' shares are their recoveries; an end of a line too
    shades = [(0.3, 0.45, 0.5), (0.55, 0.6, 0.65), (0.7, 0.75, 0.8), (0.9, 0.95, 0.4)]
    instances = []
    for one, (a, b, c) in zip(rows, shades, strict=True):
        signed = {id: [8 * r - 4 for r in (a, sign * b, 1.0, -c)] for id, sign in ((one.id, 1), (f"{one.id}-away", -1))}
        for name, single in signed.items():
            instances.append(one.model_copy(update={"id": name, "measures": SUFFIX | {"single": single}}))
    instances = tuple(instances)
    counts = records.count_inclusion(instances)
    texts = {str(i): WORDS.get(i, f" v{i}") for i in records.token_ids(instances)}
    put(results, made.model_copy(update={"instances": instances, "inclusion": counts, "vocabulary": texts}))
    out = tmp_path / "shades.html"
    out.write_text(rendered(results, "shades"), encoding="utf-8")
    seen = set()
    with browser.page() as tab:
        tab.open(out, dark=dark)
        for pair in range(8):
            choose(tab, "pair", pair)
            seen |= {abs(share) for share in shares(tab)}
            each = "(t => [getComputedStyle(t).color, getComputedStyle(t).backgroundColor])"
            for colours in tab.js(f"[...document.querySelectorAll('.token')].map({each})"):
                dim, bright = sorted(map(luminance, colours))
                assert (bright + 0.05) / (dim + 0.05) >= 4.5, (pair, colours)
        assert tab.errors == []
    assert seen >= {share for three in shades for share in three}


@browser.needs_browser
def test_hovering_shows_the_number(tiny):
    with browser.page() as tab:
        tab.open(tiny)
        tab.js(f"{token(5)}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        where = tab.js(f"(b => [b.left + b.width / 2, b.top + b.height / 2])({token(5)}.getBoundingClientRect())")
        tab.send("Input.dispatchMouseEvent", type="mouseMoved", x=where[0], y=where[1])
        assert "position 5, class action.target, slot action.target[0]. This pair: R 1.000" in told(tab)
        assert tab.js(f"{token(5, arm=2)}.classList.contains('here')")  # its twin in the other prompt, too


@browser.needs_browser
def test_ids_stand_where_there_are_no_texts(results, tmp_path):
    put(results, record("suffix", SUFFIX, model="ids", words=False))
    out = tmp_path / "ids.html"
    out.write_text(rendered(results, "ids"), encoding="utf-8")
    with browser.page() as tab:
        tab.open(out)
        assert tab.js(f"{token(3)}.textContent") == "#7"
        assert tab.errors == []


@browser.needs_browser
def test_the_page_is_dark_where_the_reader_wants_it(tiny):
    def of_body(tab: browser.Page, what: str) -> float:
        return luminance(tab.js(f"getComputedStyle(document.body).{what}"))

    with browser.page() as tab:
        tab.open(tiny)
        assert of_body(tab, "backgroundColor") > 0.9
        assert of_body(tab, "color") < 0.05
        tab.open(tiny, dark=True)
        assert of_body(tab, "backgroundColor") < 0.05
        assert of_body(tab, "color") > 0.7
        assert tab.errors == []


def test_pictures_are_small():
    from figures import locality, style

    with style.styled():
        figure = locality.draw({"m/locality/r": make_record()})["m/locality/r"]
        encoded, size = images.encode(figure)
    assert len(encoded) < 120_000
    assert size == (int(figure.get_figwidth() * images.DPI), int(figure.get_figheight() * images.DPI))
