"""`draftline plan`: rates, the split they ask for, memory, traffic, time; and one clear line for what cannot be."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from draftline.capacity import expect
from draftline.cli import app
from draftline.errors import UserError
from draftline.pipeline import planning
from draftline.pipeline.ceilings import ceiling_of
from draftline.pipeline.measure import made_up_row
from draftline.pipeline.planning import auto_split, plan_split
from draftline.pipeline.runplan import make_run_plan
from draftline.pipeline.work import drafter_work, target_work
from draftline.pipeline.workers import load_targets, make_drafters
from draftline.target.size import target_size


def lengths_of(plan):
    return [int(plan.dataset.lengths[i]) for i in plan.rows[0].samples]


def test_a_plan_for_another_gpu_recommends_the_best_split_and_tells_what_follows(make_run):
    report = plan_split(make_run(), 8, gpu="H200")
    chosen = report.chosen
    assert chosen.targets + chosen.drafters == 8 and len(report.ranked) == 7
    assert chosen.tokens_per_s == max(e.tokens_per_s for e in report.ranked)
    assert report.data_s == pytest.approx(report.data_tokens / chosen.tokens_per_s)
    assert report.traffic_bytes_per_s == pytest.approx(chosen.tokens_per_s * report.bytes_per_token)
    assert [m.device for m in report.memory] == [f"cuda:{i}" for i in range(8)]
    assert "recommended" in "\n".join(report.lines())
    content = json.loads(report.to_json())
    assert content["chosen"]["targets"] == chosen.targets and content["memory"][0]["total_bytes"] > 0


def test_the_estimate_moves_the_split_to_the_side_with_more_work(make_run):
    seldom = "sync.every_rows=1000000"  # averaging a tiny drafter would cost more than training it
    few = plan_split(make_run(seldom, "drafter.num_layers=1", "objective.anchors=1"), 8, gpu="H200")
    many = plan_split(make_run(seldom, "drafter.num_layers=4", "objective.anchors=64"), 8, gpu="H200")
    assert many.rates.drafter_tokens_per_s < few.rates.drafter_tokens_per_s
    assert many.chosen.drafters > few.chosen.drafters


def test_a_measured_plan_runs_both_stages(make_run, monkeypatch):
    monkeypatch.setattr(planning, "MEASURED_ROWS", 2)
    report = plan_split(make_run(), 2, measure=True)
    assert report.how == "measured" and report.rates.target_tokens_per_s > 0 < report.rates.drafter_tokens_per_s
    alone = expect(report.rates, 1, 1, planning.rounds_of(make_run_plan(make_run()), ceiling_of("H200"))(1, 1))
    assert report.chosen.tokens_per_s == pytest.approx(alone.tokens_per_s, rel=0.2)


def test_one_gpu_is_shared(make_run):
    report = plan_split(make_run(), 1, gpu="L4")
    rates = report.rates
    assert report.traffic_bytes_per_s == 0 and [m.device for m in report.memory] == ["cuda:0"]
    both = 1 / (1 / rates.target_tokens_per_s + 1 / rates.drafter_tokens_per_s)
    assert report.chosen.tokens_per_s == pytest.approx(both)


def test_without_prepared_data_full_rows_are_planned(make_run, tmp_path):
    report = plan_split(make_run(data=tmp_path / "not-yet"), 4, gpu="H200")
    assert report.data_s is None and "no data is prepared" in report.lines()[-1]


def test_auto_split_shares_out_the_devices_that_are_named(make_run, monkeypatch):
    names = [f"cuda:{i}" for i in range(4)]
    monkeypatch.setattr(planning, "resolve_devices", lambda _: [*names, *names])
    monkeypatch.setattr(planning, "device_and_ceiling", lambda _: ("cuda", ceiling_of("A100")))
    config, report = auto_split(make_run())
    pipeline = config.pipeline
    assert (*pipeline.target_devices, *pipeline.drafter_devices) == tuple(names)
    assert len(pipeline.target_devices) == report.chosen.targets
    assert "4 x A100" in report.split_line()


def test_auto_split_on_one_device_gives_it_to_both(make_run):
    config, report = auto_split(make_run())
    assert config.pipeline.target_devices == config.pipeline.drafter_devices == ("cpu",)
    assert report.workers == 1


@pytest.mark.parametrize(
    ("workers", "options", "words"),
    [
        (0, {}, "0 GPUs cannot train anything"),
        (2**63, {}, "GPUs are more than can be planned for"),
        (2, {"gpu": "Voodoo2"}, "nothing is known about GPU 'Voodoo2'"),
        (2, {"gpu": "H200", "measure": True}, "leave out --gpu"),
    ],
)
def test_bad_input_is_one_line(make_run, workers, options, words):
    with pytest.raises(UserError, match=words) as caught:
        plan_split(make_run(), workers, **options)
    assert "\n" not in str(caught.value)


def test_what_fits_no_gpu_is_refused_with_the_numbers(make_run, monkeypatch):
    small = planning.Ceiling("pocket GPU", ("pocket",), 1e12, 2**20, 1e9, 1e9)
    monkeypatch.setattr(planning, "ceiling_of", lambda _: small)
    with pytest.raises(UserError, match=r"does not fit: cuda:\d would need .* GiB .*, pocket GPU has 0.0 GiB"):
        plan_split(make_run(), 4, gpu="pocket")


def test_the_command_prints_lines_or_json_and_exits_2_on_bad_input(make_run, tmp_path):
    make_run()
    arguments = ["plan", str(tmp_path / "run.yaml"), "--gpus", "4", "--gpu", "H100"]
    assert "(targets:drafters) on 4 x H100" in CliRunner().invoke(app, arguments).stdout
    assert json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["workers"] == 4
    assert CliRunner().invoke(app, arguments[:2]).exit_code == 2  # how many GPUs?


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40 GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
    ],
)
def test_gpus_are_known_by_the_names_that_torch_gives_them(name, known):
    assert ceiling_of(name).name == known


def test_flops_of_the_target_are_those_that_torch_counts(make_run):
    plan = make_run_plan(make_run())
    target = load_targets(plan)[0]
    lengths = [8]  # so short that scores are next to nothing
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        target.decoder(input_ids=torch.zeros(1, 8, dtype=torch.long), use_cache=False)
    taps = (plan.facts.num_layers - 1,)
    work = target_work(plan.config, plan.facts, target_size(plan.config.target), taps, lengths)
    assert work.flops == pytest.approx(counter.get_total_flops(), rel=0.05)


def test_flops_of_the_drafter_are_those_that_torch_counts(make_run):
    plan = make_run_plan(make_run("objective.anchors=8"))
    worker = make_drafters(plan, load_targets(plan)[0], None)[0]
    row = made_up_row(plan.spec, plan.dataset, plan.rows[0], torch.device("cpu"), teacher=False)
    with FlopCounterMode(display=False) as counter:
        worker.step.forward_backward(row)
    assert drafter_work(plan, lengths_of(plan)).flops == pytest.approx(counter.get_total_flops(), rel=0.15)
