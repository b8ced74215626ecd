"""Starting from the target's own layers, and states that are captured once."""

from __future__ import annotations

import pytest
import torch

from draftline.config.drafter_spec import DrafterSpec
from draftline.config.schema import TargetConfig
from draftline.drafter.model import Drafter
from draftline.errors import UserError
from draftline.pipeline import workers
from draftline.pipeline.checkpoint import latest_checkpoint, read_checkpoint
from draftline.pipeline.coordinator import train
from draftline.pipeline.runplan import make_run_plan
from draftline.target.capture import TargetCapture
from draftline.target.load import load_target


def initial(config):
    plan = make_run_plan(config)
    target = load_target(TargetConfig(model=config.target.model), "cpu")
    return workers.initial_weights(config, plan.spec, target), target, plan


def test_layers_are_those_of_the_target(make_run):
    weights, target, _ = initial(make_run("drafter.init=target_layers", "drafter.intermediate_size=null"))
    for own, theirs in ((0, 2), (1, 3)):  # the last two of four
        layer = target.layers[theirs]
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "input_layernorm", "self_attn.k_norm"):
            assert torch.allclose(weights[f"layers.{own}.{name}.weight"], layer.get_parameter(f"{name}.weight")), name
    assert torch.allclose(weights["norm.weight"], target.final_norm.weight)
    hidden = target.hidden_size
    assert torch.allclose(weights["fc.weight"][:, -hidden:], torch.eye(hidden), atol=0.02)


def test_gemma_norms_are_copied_as_effective_scales(make_tiny_target):
    """Gemma stores w and multiplies by 1 + w; copying w itself would start from a wrong scale."""
    from draftline.drafter.warm_start import _scale

    target = load_target(TargetConfig(model=str(make_tiny_target("gemma2"))), "cpu")
    norm = target.layers[0].input_layernorm
    assert torch.allclose(_scale(norm, target.hidden_size), 1.0 + norm.weight, atol=1e-5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafter.intermediate_size=64", "gate_proj of the target's layer"),
        ("drafter.init_layers=[0,9]", "do not exist"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(make_run, override, message):
    sizes = [] if "intermediate" in override else ["drafter.intermediate_size=null"]
    with pytest.raises(UserError, match=message):
        initial(make_run("drafter.init=target_layers", override, *sizes))


def test_warm_start_from_an_export_gives_its_weights(make_run):
    first = make_run("max_rows=3", name="first")
    exported = train(make_run_plan(first)).export
    weights, _, plan = initial(make_run(f"drafter.init_from={exported}", name="second"))
    masters = read_checkpoint(latest_checkpoint(first.output)[0]).weights
    assert all(torch.equal(weights[n], masters[n].to(torch.bfloat16).float()) for n in masters)
    assert isinstance(plan.spec, DrafterSpec)
    with pytest.raises(UserError, match="block_size 4 there, 6 here"):
        initial(make_run(f"drafter.init_from={exported}", "drafter.block_size=6", name="third"))


def test_states_are_captured_once_and_train_the_same(make_run, monkeypatch):
    captured = []
    original = TargetCapture.capture

    def counting(self, planned, samples):
        captured.append(len(samples))
        return original(self, planned, samples)

    monkeypatch.setattr(TargetCapture, "capture", counting)
    plain, cached = (
        make_run("epochs=3", name="plain"),
        make_run("epochs=3", "pipeline.state_cache_bytes=99999999", name="c"),
    )
    train(make_run_plan(plain))
    without = len(captured)
    captured.clear()
    plan = make_run_plan(cached)
    train(plan)
    first_epoch = sum(row.epoch == 0 for row in plan.rows)
    assert len(captured) - (without - len(plan.rows)) == first_epoch  # what the self-test captures is in both
    a, b = (read_checkpoint(latest_checkpoint(c.output)[0]).weights for c in (plain, cached))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-4, msg=name)


def test_the_cache_keeps_to_its_bytes(make_run):
    config = make_run("epochs=2", "pipeline.state_cache_bytes=20000")
    assert train(make_run_plan(config)).ledger.remaining == 0


def test_a_drafter_built_from_the_spec_alone_is_the_trainers(make_run):
    config = make_run("max_rows=3")
    train(make_run_plan(config))
    checkpoint = read_checkpoint(latest_checkpoint(config.output)[0])
    drafter = Drafter(DrafterSpec.model_validate(checkpoint.state["spec"]))
    assert drafter.load_state_dict(checkpoint.weights, strict=True)
