"""Promises of `draftline report`: one file that needs nothing else, holds the run's figures, and stays small."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from draftline.report.command import write_report
from draftline.report.source import read_run
from draftline.report.tables import evaluation_tables
from made_run import evaluation, make_run

MOST_BYTES = 8 * 10**6


class Page(HTMLParser):
    """Elements and words of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.charts: list[dict] = []
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._in = dict(attrs).get("id") or tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag):
        self._in = ""

    def handle_data(self, data):
        if self._in == "charts":
            self.charts = json.loads(data)
        elif not self._in and data.strip():
            self.words.append(data.strip())


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("made") / "run")
    evaluation(run / "evaluation.json")
    return Page(write_report([run]).read_text(encoding="utf-8"))


def test_the_page_fetches_nothing(page):
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed"), tag
        assert "src" not in attributes, attributes
        assert not (attributes.get("href") or "#").startswith(("http", "//")), attributes


def test_every_chart_has_its_place_and_a_text_alternative_with_figures(page):
    keys = {chart["key"] for chart in page.charts}
    assert keys >= {"loss", "acceptance", "rate", "norm", "throughput", "timeline", "budget", "recall-train"}
    places = {a["id"]: a for _, a in page.elements if (a.get("id") or "").startswith("chart-")}
    assert set(places) == {f"chart-{key}" for key in keys}
    for place in places.values():
        assert place["role"] == "img" and re.search(r"\d", place["aria-label"])
    assert "10 at row 1" not in places["chart-loss"]["aria-label"]
    assert "9.8 at row 1, 2 at row 40" in places["chart-loss"]["aria-label"]


def test_every_element_is_closed_by_the_same_element(page):
    """`html.parser` is lenient; the words behind the last chart are only there if nothing before swallowed them."""
    assert page.words[-1].startswith("Written by draftline")


def test_figures_of_the_run_stand_in_the_page(page):
    text = " ".join(page.words)
    for words in (
        "40 committed of 40 planned",
        "new chain 1.75, new tree@64 2.25",
        "1.65 to 1.85",
        "2.99",
        "fingerprint t1",
        "row_tokens: 64",
        "no such folder",
    ):
        assert words.replace("fingerprint t1", "t1") in text


def test_what_a_run_names_is_text_and_never_markup(page):
    assert "org/<name>" in page.words
    assert not any(tag == "name" for tag, _ in page.elements)


def test_the_timeline_tells_how_long_each_worker_waited(page):
    chart = next(c for c in page.charts if c["key"] == "timeline")
    names = {(trace["stackgroup"], trace["name"]) for trace in chart["traces"]}
    assert names == {("target-0", "working"), ("drafter-0", "working"), ("drafter-0", "waiting for a row")}
    label = next(a["aria-label"] for _, a in page.elements if a.get("id") == "chart-timeline")
    assert "drafter-0: working 75 %, waiting for a row 25 %" in label


def test_acceptance_by_budget_holds_validation_and_decoding(page):
    chart = next(c for c in page.charts if c["key"] == "budget")
    found = {trace["name"]: (trace["x"], trace["y"]) for trace in chart["traces"]}
    assert found == {
        "validation, at anchors": ([16.0, 64.0], [1.9, 2.2]),
        "evaluation: new, decoded": ([64.0], [2.25]),
    }
    assert chart["layout"]["xaxis"]["ticktext"] == ["16", "64"]  # the budgets themselves, not the powers of ten


def test_terms_are_dotted_so_that_a_loss_below_its_only_term_is_seen(page):
    chart = next(c for c in page.charts if c["key"] == "loss")
    dotted = {trace["name"] for trace in chart["traces"] if trace.get("line", {}).get("dash") == "dot"}
    assert dotted and dotted == {trace["name"] for trace in chart["traces"]} - {"loss", "validation"}


def test_at_a_glance_it_tells_which_side_waited(page):
    at = page.words.index("waiting, share of each side's time")
    assert page.words[at + 1] == "targets 0 %, drafters 25 %"


def test_the_only_prompt_set_is_not_shown_a_second_time_as_all_of_them(tmp_path):
    run = make_run(tmp_path / "run")
    evaluation(run / "evaluation.json")
    report = json.loads((run / "evaluation.json").read_text())
    report["results"] = [{**result, "prompt_set": name} for result in report["results"] for name in ("maths", "all")]
    (run / "evaluation.json").write_text(json.dumps(report))
    rows = evaluation_tables(read_run(run, []).evaluations)
    assert {row[0] for row in next(rows).rows} == {"maths"}


def test_acceptance_by_position_and_by_category_is_that_of_decoding(page):
    chart = next(c for c in page.charts if c["key"] == "positions")
    found = {trace["name"]: (trace["x"], trace["y"]) for trace in chart["traces"]}
    assert found["evaluation: new chain"] == ([1.0, 2.0], [0.75, 0.25])
    assert "evaluation: None plain" not in found
    at = page.words.index("category: maths")
    assert page.words[at + 1 : at + 6] == ["new", "chain", "3", "1.125", "-"]


def test_a_run_of_a_hundred_thousand_rows_stays_small(tmp_path):
    run = make_run(tmp_path / "long", rows=100_000, every=20)
    file = write_report([run])
    assert file.stat().st_size < MOST_BYTES
    chart = next(c for c in Page(file.read_text()).charts if c["key"] == "loss")
    assert all(len(trace["x"]) <= 1300 for trace in chart["traces"])


def test_a_comparison_shows_each_curve_of_both_and_what_differs(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", rate=5e-4, final=1.25)]
    page = Page(write_report(runs, compare=True, output=tmp_path / "both.html").read_text())
    loss = next(c for c in page.charts if c["key"] == "train-loss")
    assert {t["name"]: t["y"][-1] for t in loss["traces"]} == {"a": 2.0, "b": 1.25}
    words = page.words
    at = words.index("optimizer.learning_rate")
    assert words[at + 1 : at + 3] == ["0.001", "0.0005"]
    assert "Throughput, tokens per second" in words


def test_a_curve_of_one_run_alone_has_its_runs_colour_and_name(tmp_path):
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    lines = (first / "metrics.jsonl").read_text().replace("validation/", "other/")
    (first / "metrics.jsonl").write_text(lines)
    (second / "metrics.jsonl").write_text((second / "metrics.jsonl").read_text().replace("tree_16", "tree_100"))
    page = Page(write_report([first, second], compare=True, output=tmp_path / "both.html").read_text())
    charts = {c["key"]: c for c in page.charts}
    trees = [key for key in charts if key.startswith("validation-acceptance_tree")]
    assert trees == ["validation-acceptance_tree_64", "validation-acceptance_tree_100"]  # in the order of numbers
    (trace,) = charts[trees[0]]["traces"]
    colours = {t["name"]: t["meta"]["c"] for t in charts["train-loss"]["traces"]}
    assert trace["name"] == "b" and trace["meta"]["c"] == colours["b"] and charts[trees[0]]["layout"]["showlegend"]
    assert "Acceptance length of validation, tree@64" in page.words
