"""The candidate selector's scores, its walk, and its loss against one written out slot by slot."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash2_kit import DFLASH2, awake
from draftline.config.dflash2 import SelectorObjective
from draftline.config.drafter_spec import Dflash2Spec
from draftline.config.schema import ExponentialDecay, ObjectiveConfig
from draftline.drafter.blocks import draw_blocks
from draftline.drafter.model import Drafter
from draftline.drafter.selector import CandidateSelector, PathScores
from draftline.drafter.step import DrafterStep
from draftline.records import FrozenHead, HiddenStateRow
from objective_kit import dense_logits, random_embedding, random_head, random_row, tiny_spec

SPEC = tiny_spec(dflash2=Dflash2Spec(**DFLASH2))
GAMMA, ROW_TOKENS = 3.0, 96


def selector(top_k: int = 5) -> CandidateSelector:
    made = CandidateSelector(SPEC, Dflash2Spec(**(DFLASH2 | {"selector_top_k": top_k})))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made.double()


def random_paths(blocks: int, depth: int, width: int, seed: int = 0) -> PathScores:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(blocks, depth, width, width, generator=generator).double()
    scores[:, 0] = scores[:, 0, :1]
    tokens = torch.stack([torch.randperm(30, generator=generator)[:width] for _ in range(blocks * depth)])
    return PathScores(tokens.view(blocks, depth, width), scores)


def test_the_scores_of_a_step_are_the_same_alone_and_in_the_table_of_all_steps() -> None:
    made, generator = selector(), torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 3, SPEC.hidden_size, generator=generator).double()
    logits = torch.randn(2, 3, 5, generator=generator).double()
    tokens = torch.randint(0, SPEC.vocab_size, (2, 3, 5), generator=generator)
    anchor = torch.tensor([7, 3])
    table = made.paths(hidden, logits, tokens, anchor).scores_AKCC
    for a, k, i in itertools.product(range(2), range(3), range(5)):
        before = anchor[a] if k == 0 else tokens[a, k - 1, i]
        alone = made.score(hidden[a, k][None], logits[a, k][None], tokens[a, k][None], before[None])
        torch.testing.assert_close(table[a, k, i], alone[0])
        steered = made.predecessor_codebook[before] * (made.hidden_projection.weight @ hidden[a, k])
        torch.testing.assert_close(alone[0], logits[a, k] + made.successor_codebook[tokens[a, k]] @ steered)


def test_the_walk_takes_the_best_step_behind_each_step_taken() -> None:
    paths = random_paths(6, 4, 5)
    for a, chain in enumerate(paths.chain().tolist()):
        at, wanted = 0, []
        for k in range(4):
            at = int(paths.scores_AKCC[a, k, at].argmax())
            wanted.append(int(paths.tokens_AKC[a, k, at]))
        assert chain == wanted
    none = PathScores(torch.zeros(2, 0, 3, dtype=torch.int64), torch.zeros(2, 0, 3, 3))
    assert none.chain().shape == (2, 0)


def test_with_all_tokens_as_candidates_the_walk_is_over_the_whole_vocabulary() -> None:
    made, generator = selector(SPEC.vocab_size), torch.Generator().manual_seed(4)
    hidden = torch.randn(1, 3, SPEC.hidden_size, generator=generator).double()
    logits = 3 * torch.randn(1, 3, SPEC.vocab_size, generator=generator).double()
    best = logits.topk(SPEC.vocab_size, dim=-1)
    chain, before = made.paths(hidden, best.values, best.indices, torch.tensor([4])).chain()[0].tolist(), 4
    for k in range(3):
        edges = made.successor_codebook @ (
            made.predecessor_codebook[before] * (made.hidden_projection.weight @ hidden[0, k])
        )
        before = int((logits[0, k] + edges).argmax())
        assert chain[k] == before


def make_step(form: str = "fused", head: FrozenHead | None = None, seed: int = 0, **selector: Any) -> DrafterStep:
    objective = ObjectiveConfig(
        anchors=12,
        decay=ExponentialDecay(gamma=GAMMA),
        head=form,
        head_chunk_positions=7,
        selector=SelectorObjective(**selector),
    )
    return DrafterStep(
        awake(Drafter(SPEC).double(), seed=seed),
        random_embedding(SPEC, torch.float64),
        head or random_head(SPEC, torch.float64),
        objective,
        row_tokens=ROW_TOKENS,
        seed=7,
    )


def odd_head() -> FrozenHead:
    plain = random_head(SPEC, torch.float64)
    bias = torch.randn(SPEC.vocab_size, generator=torch.Generator().manual_seed(3)).double()
    return FrozenHead(plain.weight_VH, bias, multiplier=1.4, softcap=5.0)


def reference(step: DrafterStep, row: HiddenStateRow) -> tuple[float, dict[str, Tensor]]:
    """Whole loss and its gradients by autograd, slot by slot; also slots whose label is no candidate must occur."""
    drafter, told = step._drafter, step._objective.selector
    blocks = draw_blocks(row, SPEC, step._objective, row_tokens=ROW_TOKENS, seed=7)
    x_QH = step._embedding.weight_VH[blocks.block_ids_AB.flatten()]
    mask = drafter.build_masks(row.document_ids_T, blocks.anchors_A, blocks.document_A)
    hidden = drafter(x_QH, row.taps_TF, mask, row.position_ids_T, blocks.position_ids_AB.flatten())
    hidden = hidden.unflatten(0, blocks.labels_AB.shape)
    made, total, missing = drafter.candidate_selector, torch.zeros((), dtype=torch.float64), 0
    for a, t in blocks.slot_mask_AB.nonzero().tolist():
        weight, y = math.exp(-(t - 1) / GAMMA), int(blocks.labels_AB[a, t])
        z_V = dense_logits(hidden[a, t], step._head)
        total = total - weight * torch.log_softmax(z_V, 0)[y]
        ids = z_V.topk(5).indices.tolist()
        if y not in ids:
            missing += 1
            if told.missing == "skip":
                continue
            ids[-1] = y
        logits, h = z_V[ids], hidden[a, t]
        if told.stop_gradient:
            logits, h = logits.detach(), h.detach()
        before = blocks.labels_AB[a, t - 1]
        steered = made.predecessor_codebook[before] * (made.hidden_projection.weight @ h)
        scores = logits + made.successor_codebook[ids] @ steered
        total = total + told.weight * weight * (scores.logsumexp(0) - scores[ids.index(y)])
    assert missing > 3
    total.backward()
    return float(total.detach()), take_gradients(step)


def take_gradients(step: DrafterStep) -> dict[str, Tensor]:
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in step._drafter.named_parameters()}
    step._drafter.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize(
    ("form", "head", "selector"),
    [
        ("fused", "plain", {}),
        ("fused", "odd", {"missing": "inject", "weight": 0.7}),
        ("fused", "odd", {"stop_gradient": True}),
        ("checkpointed", "odd", {"missing": "inject"}),
        ("checkpointed", "plain", {"stop_gradient": True, "missing": "inject"}),
    ],
)
def test_loss_and_all_gradients_are_those_of_the_formula(form: str, head: str, selector: dict[str, Any]) -> None:
    step = make_step(form, odd_head() if head == "odd" else None, **selector)
    row = random_row((30, 21, 40), SPEC, dtype=torch.float64)
    wanted, gradients = reference(step, row)
    stats = step.forward_backward(row)
    assert float(stats.numerator) == pytest.approx(wanted, rel=1e-9)
    found = take_gradients(step)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-7, atol=1e-9, msg=name)
    for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight"):
        assert found[f"candidate_selector.{name}"].abs().max() > 1e-4


def test_weight_zero_leaves_the_selector_alone_and_every_other_gradient_bitwise() -> None:
    row = random_row((30, 21, 40), SPEC, dtype=torch.float64)
    step = make_step(weight=0.0)
    step.forward_backward(row)
    found = take_gradients(step)
    plain = Drafter(SPEC.model_copy(update={"dflash2": None})).double()
    assert all(not g.any() for n, g in found.items() if n.startswith("candidate_selector."))
    with_loss = make_step()
    with_loss.forward_backward(row)
    changed = take_gradients(with_loss)
    assert any(not torch.equal(found[n], changed[n]) for n in plain.state_dict())
    stopped = make_step(stop_gradient=True)
    stopped.forward_backward(row)
    kept = take_gradients(stopped)
    assert all(torch.equal(found[n], kept[n]) for n in found if not n.startswith("candidate_selector."))


def test_the_selectors_weight_rises_over_the_first_rows_of_the_plan() -> None:
    step = make_step(warmup_rows=4, weight=2.0)
    assert step._selector is not None
    assert [step._selector.factor(row) for row in (0, 1, 3, 4, 50)] == [0.5, 1.0, 2.0, 2.0, 2.0]


def test_sums_tell_the_selectors_accuracy_beside_that_of_the_head_alone() -> None:
    row = random_row((30, 21, 40), SPEC, dtype=torch.float64)
    summary = make_step().evaluate(row).summary()
    told = summary["selector"]
    slots = summary["counts"]["supervised_slots"]
    assert told["recall"] == pytest.approx(_recall_at_5(make_step(), row))
    assert 0 < told["accuracy"] <= told["recall"] < 1
    assert told["accuracy"] == pytest.approx(told["accuracy_found"] * told["recall"])
    assert told["oracle_acceptance_length"] >= summary["acceptance_length"] >= 1
    assert slots > 20


def _recall_at_5(step: DrafterStep, row: HiddenStateRow) -> float:
    blocks = draw_blocks(row, SPEC, step._objective, row_tokens=ROW_TOKENS, seed=7, epoch=-1)
    x_QH = step._embedding.weight_VH[blocks.block_ids_AB.flatten()]
    mask = step._drafter.build_masks(row.document_ids_T, blocks.anchors_A, blocks.document_A)
    with torch.no_grad():
        hidden = step._drafter(x_QH, row.taps_TF, mask, row.position_ids_T, blocks.position_ids_AB.flatten())
    places = blocks.slot_mask_AB.flatten().nonzero().flatten().tolist()
    labels = blocks.labels_AB.flatten()
    hits = [int(labels[q]) in dense_logits(hidden[q], step._head).topk(5).indices.tolist() for q in places]
    return sum(hits) / len(hits)


def test_a_drafter_without_a_selector_tells_nothing_of_one() -> None:
    spec = SPEC.model_copy(update={"dflash2": None})
    step = DrafterStep(
        Drafter(spec).double(),
        random_embedding(spec, torch.float64),
        random_head(spec, torch.float64),
        ObjectiveConfig(anchors=12),
        row_tokens=ROW_TOKENS,
        seed=7,
    )
    assert step.evaluate(random_row((30,), spec, dtype=torch.float64)).summary()["selector"] is None
