"""Promises of thinning and of the timeline: nothing that matters is lost, whatever the run's length."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.report.curves import Curve, read_metrics, thin
from draftline.report.timeline import BINS, read_timeline


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=400), st.integers(6, 50))
def test_thinning_keeps_ends_gaps_and_extremes(values, most):
    curve = Curve(list(range(len(values))), list(values))
    steps, kept = thin(curve, most)
    assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] == len(values) - 1
    assert kept.count(None) == values.count(None)
    known = [v for v in values if v is not None]
    if known:
        left = [v for v in kept if v is not None]
        assert min(left) == pytest.approx(min(known), rel=1e-5)
        assert max(left) == pytest.approx(max(known), rel=1e-5)
    assert len(left if known else []) <= most + 2


def test_a_session_that_went_back_to_a_checkpoint_opens_a_new_stretch(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s, "train/loss": 1.0 * s}) + "\n" for s in (1, 2, 3, 2, 3)))
    curve = read_metrics(path).curves["train/loss"]
    assert (curve.steps, curve.values) == ([1, 2, 3, 2, 2, 3], [1.0, 2.0, 3.0, None, 2.0, 3.0])


def write(path, sessions):
    with path.open("w") as file:
        for mono, spans in sessions:
            file.write(json.dumps({"anchor": 1, "wall": 50.0 + mono, "mono": mono, "pid": 1}) + "\n")
            for worker, activity, what, t0, t1 in spans:
                file.write(json.dumps({"w": worker, "a": activity, "d": what, "t0": t0, "t1": t1}) + "\n")
    return path


def test_a_span_inside_another_is_not_counted_twice(tmp_path):
    spans = [("d", "waiting", "a row", 2.0, 3.0), ("d", "averaging", "", 4.0, 4.5), ("d", "working", "all", 1.0, 5.0)]
    line = read_timeline(write(tmp_path / "events.jsonl", [(0.0, spans)]))
    assert line.totals("d") == pytest.approx({"working": 2.5, "waiting for a row": 1.0, "averaging": 0.5})


@pytest.mark.parametrize("length", [0.5, 90.0, 5e5])
def test_no_second_is_lost_or_doubled_however_long_the_run(tmp_path, length):
    step = length / 100
    spans = [("t", "working", "", i * step, (i + 0.5) * step) for i in range(100)]
    line = read_timeline(write(tmp_path / "events.jsonl", [(0.0, spans)]))
    assert line.totals("t")["working"] == pytest.approx(length / 2, rel=1e-6)
    assert line.n_bins <= 2 * BINS and all(s <= line.bin_s * 1.0001 for s in line.seconds["t"]["working"])


def test_sessions_follow_each_other_without_the_pause_between(tmp_path):
    first = (100.0, [("t", "working", "", 100.0, 110.0)])
    second = (5000.0, [("t", "working", "", 5001.0, 5003.0)])
    line = read_timeline(write(tmp_path / "events.jsonl", [first, second]))
    assert line.session_starts_s == [0.0, 10.0]
    assert line.length_s == pytest.approx(13.0)
