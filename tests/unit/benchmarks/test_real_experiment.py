"""The experiment on real drafters: what can be checked of it without a target."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from draftline.data.shards import Sample
from draftline.decode.sampling import GREEDY, Sampler
from draftline.decode.steps import RoundContext
from draftline.errors import UserError
from draftline.records import HiddenStateRow, PlannedRow

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
ENVIRONMENT = {"device": "a GPU", "torch": "2", "transformers": "5", "specforge": "0.2.0", "commit": "abcdef0123"}


@pytest.fixture
def real(monkeypatch):
    """The experiment's modules, by name; forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "real"))
    import prompts
    import report
    import scoring
    import settings
    import states
    import store
    import tables
    import training
    import variants

    yield SimpleNamespace(
        **{m.__name__: m for m in (prompts, report, scoring, settings, states, store, tables, training, variants)}
    )
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def store_in(real, folder, merged=None, settings=None, left_s=60.0):
    merged = merged or folder / "results.json"
    return real.store.Store(folder, merged, time.monotonic() + left_s, ENVIRONMENT, settings or {"a": 1})


def test_a_part_is_measured_once_and_restored_from_the_merged_file(real, tmp_path):
    calls = []
    first = store_in(real, tmp_path / "one", tmp_path / "results.json")
    for _ in range(2):
        first.part("p", lambda: calls.append(1) or {"x": 2.5}, cost_s=1.0)
    assert calls == [1]
    other = store_in(real, tmp_path / "lost", tmp_path / "results.json")
    other.restore()
    found = other.part("p", lambda: pytest.fail("measured again"), cost_s=1.0)
    assert found["x"] == 2.5 and found["environment"] == ENVIRONMENT


def test_parts_of_other_settings_are_refused(real, tmp_path):
    store_in(real, tmp_path).part("p", dict, cost_s=0.0)
    with pytest.raises(UserError, match=r"other settings \(a\)"):
        store_in(real, tmp_path, settings={"a": 2}).restore()


def test_no_part_starts_that_would_end_too_late_and_a_part_that_cannot_run_is_not_recorded(real, tmp_path):
    store = store_in(real, tmp_path, left_s=5.0)
    assert store.part("long", lambda: pytest.fail("started"), cost_s=10.0) is None and store.left == ["long"]

    def unavailable():
        raise real.store.UnavailableError("not installed")

    assert store.part("peer", unavailable, cost_s=1.0) is None
    assert not store.path("peer").exists() and not store.failed


def test_a_part_that_fails_is_told_and_does_not_stop_the_others(real, tmp_path, capsys):
    def fails():
        raise RuntimeError("out of memory")

    store = store_in(real, tmp_path)
    assert store.part("bad", fails, cost_s=1.0) is None and store.part("good", dict, cost_s=1.0) is not None
    assert store.failed == ["bad"] and "out of memory" in capsys.readouterr().out


def test_a_mistake_ends_the_run_in_a_part_that_all_others_need_and_in_no_other(real, tmp_path):
    def mistaken():
        raise UserError("no such file", where="prompts.jsonl")

    store = store_in(real, tmp_path)
    assert store.part("one of many", mistaken, cost_s=1.0) is None and store.failed == ["one of many"]
    with pytest.raises(UserError, match="no such file"):
        store.part("answers", mistaken, cost_s=1.0, needed=True)


def test_the_recommended_recipe_takes_the_best_of_each_group_if_it_helps(real):
    scores = {variant.name: 3.0 for variant in real.variants.ABLATIONS}
    scores |= {"kl-0.15": 3.2, "kl-0.5": 3.4, "gamma-4": 3.3, "block-32": 3.25, "cap-0.1": 3.01}
    found = real.variants.combine(scores, least_gain=0.01)
    assert found.kl_weight == 0.5 and found.decay.gamma == 4.0 and found.cap_weight == 0.0
    assert found.block_size == 16  # its change of the decay is excluded by the better one
    assert found.change == "KL 0.5, gamma 4"
    assert real.variants.combine(dict.fromkeys(scores, 1.0), least_gain=0.01).change == "none"


def row_of(lengths, width=3, row_id=0):
    n_tokens, index = sum(lengths), torch.arange(sum(lengths))
    documents = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))
    return HiddenStateRow(
        row_id=row_id,
        epoch=0,
        sample_ids=tuple(f"s{row_id}-{i}" for i in range(len(lengths))),
        lengths=tuple(lengths),
        input_ids_T=index + 100 * row_id,
        loss_mask_T=index % 5 != 0,
        document_ids_T=documents,
        position_ids_T=torch.cat([torch.arange(n) for n in lengths]),
        taps_TF=torch.randn(n_tokens, width),
        final_hidden_TH=torch.randn(n_tokens, 2),
        final_hidden_norm="post",
        tap_layer_ids=(0,),
    )


def test_rows_captured_together_are_cut_back_into_the_planned_ones(real):
    whole = row_of([3, 2, 4])
    group = [PlannedRow(7, 0, (5, 1), 5, 4), PlannedRow(8, 0, (2,), 4, 3)]
    first, second = real.states.split_row(whole, group, row_tokens=6)
    assert first.lengths == (3, 2) and second.sample_ids == ("s0-2",) and second.row_id == 8
    assert first.document_ids_T.tolist() == [0, 0, 0, 1, 1, -1] and second.document_ids_T.tolist() == [0] * 4 + [-1] * 2
    assert torch.equal(second.taps_TF[:4], whole.taps_TF[5:]) and second.position_ids_T[:4].tolist() == [0, 1, 2, 3]


def test_the_padded_form_holds_the_same_states(real):
    rows = [row_of([3, 2], row_id=0), row_of([4], row_id=1)]
    padded = real.states.PaddedSamples.of(rows, 5)
    batch = padded.batch(torch.tensor([2, 1]))
    assert torch.equal(batch["hidden_states"][0, :4], rows[1].taps_TF)
    assert batch["input_ids"][1, :2].tolist() == rows[0].input_ids_T[3:].tolist()
    assert batch["loss_mask"][1].tolist() == [*rows[0].loss_mask_T[3:].float().tolist(), 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="4 tokens, more than 3"):
        real.states.PaddedSamples.of(rows, 3)


def test_every_row_comes_once_an_epoch_in_a_new_order(real):
    rows = [row_of([2], row_id=i) for i in range(6)]
    order = [real.states.rows_in_turn(rows, 0, n) for n in range(12)]
    first, second = [r.row_id for r in order[:6]], [r.row_id for r in order[6:]]
    assert sorted(first) == sorted(second) == list(range(6)) and first != second
    assert [r.epoch for r in order] == [0] * 6 + [1] * 6


class SlowTrainer:
    """Each step takes 0.4 s of a made-up clock."""

    def __init__(self):
        self.now_s, self.rates = 100.0, []

    def warm(self):
        self.now_s += 50.0

    def step(self, rate):
        self.now_s += 0.4
        self.rates.append(rate)

    def weights(self):
        self.now_s += 1000.0  # copying is not on the training clock
        return {"w": torch.tensor(len(self.rates))}


def test_training_stops_by_its_own_clock_and_the_rate_follows_it(real, monkeypatch):
    trainer = SlowTrainer()
    monkeypatch.setattr(real.training.time, "perf_counter", lambda: trainer.now_s)
    course = real.training.train_for(trainer, 10.0, 2.0, torch.device("cpu"), (0.5, 1.0))
    assert course.warm_s == 50.0 and course.steps == len(trainer.rates) == 25
    assert [s.training_s for s in course.snapshots] == pytest.approx(
        [5.2, 10.0]
    ) and course.training_s == pytest.approx(10.0)
    assert [int(s.weights["w"]) for s in course.snapshots] == [13, 25]
    assert max(trainer.rates) == trainer.rates[1] and 0 < trainer.rates[-1] < 0.1 and min(trainer.rates) > 0


def test_lookup_along_a_text_counts_what_the_decoder_would(real):
    """Against the decoder's own source of drafts, a round at a time."""
    text = [1, 2, 3, 4, 1, 2, 3, 9, 4, 1, 2, 3, 4, 1, 2]
    prompt, answer = text[:5], text[5:]
    source, sampler = real.scoring.LookupSource(16, 3), Sampler(GREEDY, "cpu")
    known, rounds = [*prompt, answer[0]], 0
    while len(known) < len(text):
        steps = source.propose(RoundContext(known, None, 16), sampler)
        try:
            next(steps)
        except StopIteration as end:
            drafts = end.value.drafts_K.tolist()
        right = 0
        while right < len(drafts) and len(known) + right < len(text) and drafts[right] == text[len(known) + right]:
            right += 1
        known = text[: min(len(known) + right + 1, len(text))]
        rounds += 1
    found = real.scoring.lookup_counts(prompt, answer)
    assert (found.tokens, found.rounds) == (len(answer) - 1, rounds) and rounds < len(answer) - 1


def test_kept_prompts_are_the_last_of_gsm8k_and_in_no_other_part(real, tmp_path):
    for name, n_rows in (("gsm8k", 40), ("arena", 12)):
        rows = [
            {"id": f"{name}-{i}", "messages": [{"role": "user", "content": f"question {i}"}]} for i in range(n_rows)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = real.prompts.PromptFiles(tmp_path / "gsm8k.jsonl", tmp_path / "arena.jsonl", tmp_path, tmp_path / "a.gz")
    parts = real.prompts.split_all(files, real.settings.TINY)
    assert [row["id"] for row in parts["gsm8k"]] == ["gsm8k-37", "gsm8k-38", "gsm8k-39"]
    assert [row["id"] for row in parts["dev"]] == ["gsm8k-35", "gsm8k-36"] and len(parts["arena"]) == 6
    ids = [row["id"] for rows in parts.values() for row in rows]
    assert len(ids) == len(set(ids)) and sum(i.startswith("gsm8k") for i in ids) == 12 + 5


def scored(value, prompts=4):
    tokens = [round(10 * value)] * (prompts - 1) + [round(10 * value) + 2]
    return {
        "acceptance_length": value,
        "interval": [value - 0.1, value + 0.1],
        "prompts": prompts,
        "tokens": tokens,
        "rounds": [10] * prompts,
    }


def main_figures(value):
    sets = ("gsm8k", "arena", "general")
    methods = {"chain": scored(value), "tree@64": scored(value * 1.5)}
    mark = {"training_s": 5.0, "steps": 9, "walked": scored(value / 2), "decoded": scored(value / 2)}
    return {
        "block_size": 16,
        "marks": [mark],
        "training_s": 10.0,
        "steps": 20,
        "step_s": 0.01,
        "walked": dict.fromkeys(sets, methods),
        "decoded": dict.fromkeys(sets, methods),
        "curve": methods,
        "environment": ENVIRONMENT,
    }


def made_up_parts(real):
    lookup = {name: {"lookup": scored(1.5)} for name in ("gsm8k", "arena", "general")}
    counts = {"samples": 3, "tokens": 30, "supervised_tokens": 20, "cut": 1}
    tried = {"learning_rate": 1e-3, "dev_chain": 2.0, "warm_s": 9.0}
    data = {"samples": {"train": counts}, "seconds": {"capture": 4.0}}
    parts = {"baselines": {"walked": lookup, "decoded": lookup, "data": data, "environment": ENVIRONMENT}}
    for side, value in (("draftline", 3.0), ("specforge", 2.5)):
        parts[f"tune-{side}"] = {"tries": [tried], "learning_rate": 1e-3, "environment": ENVIRONMENT}
        parts[f"main-{side}"] = main_figures(value)
    by_name = {variant.name: variant for variant in real.variants.ABLATIONS}
    for variant, value in ((by_name["plain"], 2.8), (by_name["kl-0.15"], 3.1)):
        methods = {"gsm8k": {"chain": scored(value), "tree@64": scored(value * 1.5)}}
        figures = {"variant": variant.as_figures(), "walked": methods, "steps": 7, "environment": ENVIRONMENT}
        parts[f"ablation-{variant.name}"] = figures
    long = main_figures(3.6)
    long["marks"] = [{"training_s": s, "steps": 10 * s, "walked": long["walked"]} for s in (30, 240)]
    parts["long-recommended"] = long
    return parts


def test_the_page_has_every_section_and_keeps_what_people_wrote(real, tmp_path):
    parts = made_up_parts(real)
    page = real.report.new_page(parts)
    assert "1.200 times (asked: 1.15)" in page and "| KL 0.15 | 7 | 3.10 (3.00-3.20) |" in page
    assert "Chain on GSM8K: 3.60 (3.50-3.70) (asked: 3.5)" in page and "| 240 | 2400 | 3.60 (3.50-3.70) |" in page
    assert "compile s" in page and "| draftline | 10.0 | 9.0 | 4.0 | 23.0 |" in page
    written = page.replace("## Size of the tree", "## Size of the tree\n\nA surprise: none.")
    parts["main-draftline"] = main_figures(4.0)
    again = real.report.updated_page(written, parts)
    assert "A surprise: none." in again and "1.600 times (asked: 1.15)" in again
    with pytest.raises(UserError, match="no section promises"):
        real.report.updated_page("<!-- begin environment --><!-- end environment -->", parts)


def test_the_plots_are_small_and_the_same_again(real, tmp_path):
    pytest.importorskip("matplotlib")
    parts = made_up_parts(real)
    texts = []
    for _ in range(2):
        real.report.plot(parts, tmp_path)
        texts.append((tmp_path / real.report.TIME_PLOT).read_bytes() + (tmp_path / real.report.TREE_PLOT).read_bytes())
    assert texts[0] == texts[1] and len(texts[0]) < 200_000


def test_samples_are_split_into_what_was_asked_and_answered(real):
    sample = Sample("s", np.array([5, 6, 7, 8], np.int32), np.array([False, False, True, True]))
    assert real.scoring.split_sample(sample) == ([5, 6], [7, 8])


def test_a_decoded_text_takes_the_place_of_the_kept_answer(real):
    kept = Sample("one", np.array([5, 6, 7, 8], np.int32), np.array([False, False, True, True]))
    sample = real.scoring.with_answer(kept, [9, 3, 4])
    assert sample.input_ids.tolist() == [5, 6, 9, 3, 4]
    assert sample.loss_mask.tolist() == [False, False, True, True, True]
    assert real.scoring.split_sample(sample) == ([5, 6], [9, 3, 4])


def test_an_estimate_is_judged_on_the_kept_answer_and_on_the_text_that_was_decoded(real):
    walked = {"chain": {"acceptance_length": 2.0, "tokens": [4, 40], "rounds": [2, 20]}}
    decoded = {"acceptance_length": 2.5, "prompts": 1, "tokens": [5], "rounds": [2]}
    part = {"walked": {"gsm8k": walked}, "decoded": {"gsm8k": {"chain": decoded}}}
    ((old,), _) = real.tables.estimates({"main-ddtree": part})
    assert (old.walked, old.along_it, round(old.off, 3), old.off_along_it) == (2.0, None, -0.2, None)
    decoded["walked_along_it"] = 2.45
    ((new,), (same,)) = real.tables.estimates({"long-recommended": part})
    assert round(new.off_along_it, 3) == -0.02 and same.cells()[2:] == new.cells()[2:]
    shown = real.tables.estimate_table({"long-recommended": part})[-1]
    assert shown == "| long run, gsm8k | chain | 2.500 | 2.000 | -20.0 % | 2.450 | -2.0 % |"
    (line,) = real.tables._estimate_verdicts([old, new], [])
    assert "20.0 % apart at most" in line and line.endswith("along the decoded texts 2.0 %.")
    assert "decoded texts" not in real.tables._estimate_verdicts([old], [])[0]


def test_an_estimate_over_all_sets_pools_tokens_and_rounds(real):
    one = {"chain": {"tokens": [10, 99], "rounds": [5, 9]}}, {"chain": {"prompts": 1, "tokens": [12], "rounds": [4]}}
    two = {"chain": {"tokens": [30], "rounds": [5]}}, {"chain": {"prompts": 1, "tokens": [30], "rounds": [6]}}
    for (_, decoded), along in ((one, 2.0), (two, 6.0)):
        decoded["chain"]["walked_along_it"] = along
    part = {"walked": {"gsm8k": one[0], "arena": two[0]}, "decoded": {"gsm8k": one[1], "arena": two[1]}}
    by_set, (pooled,) = real.tables.estimates({"main-ddtree": part})
    assert len(by_set) == 2
    assert (pooled.walked, pooled.decoded) == (4.0, 4.2)
    assert pooled.along_it == pytest.approx(42 / (12 / 2.0 + 30 / 6.0))


def test_the_long_run_is_compared_with_a_lookup_along_its_own_answers(real):
    parts = made_up_parts(real)
    assert "Chain above prompt lookup on 3 of 3 sets" in "\n".join(real.tables.verdicts(parts))
    parts["long-recommended"]["lookup"] = {"gsm8k": scored(1.5), "arena": scored(5.0), "general": scored(1.5)}
    told = "Chain above prompt lookup on 2 of 3 sets (asked: all): gsm8k 3.60 to 1.50, arena 3.60 to 5.00, general"
    assert told in "\n".join(real.tables.verdicts(parts))
    rows = [line for line in real.tables.loop_table(parts) if line.startswith("| arena")]
    assert rows == ["| arena | repeats | 4 | 5.05 | 3.65 |", "| arena | others | 0 |  |  |"]


def test_the_page_tells_what_it_took_from_nothing_and_the_long_run_apart(real):
    parts = made_up_parts(real)
    assert not [line for line in real.tables.verdicts(parts) if "from nothing" in line]
    parts["answers"] = {"from": "kept answers", "part_s": 80.4, "environment": ENVIRONMENT}
    parts["baselines"]["part_s"], parts["long-recommended"]["part_s"] = 20.2, 300.0
    assert not [line for line in real.tables.verdicts(parts) if "from nothing" in line]
    parts["answers"]["from"] = "the target"
    assert "- 2 parts from nothing in 101 s (asked: 1500); the long run 300 s more." in real.tables.verdicts(parts)
