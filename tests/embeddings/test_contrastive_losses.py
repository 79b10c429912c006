"The contrastive loss against formulas written down once more, without masks and matrices."

import math

import pytest
import torch

from bertlab.embeddings.losses import (
    ContrastiveLoss,
    EmbeddedTexts,
    distillation_loss,
    false_negative_mask,
    info_nce,
    similarity_loss,
)


def make_batch(num_pairs=5, num_negatives=0, width=8, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_pairs, width, generator=generator, dtype=dtype, requires_grad=True)
    d = torch.randn(
        num_pairs * (1 + num_negatives), width, generator=generator, dtype=dtype, requires_grad=True
    )
    groups = torch.arange(len(d))
    return EmbeddedTexts(q, groups[:num_pairs]), EmbeddedTexts(d, groups), torch.arange(num_pairs)


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b)) / math.sqrt(
        sum(x * x for x in a) * sum(y * y for y in b)
    )


def plain_loss(queries, documents, temperature, left_out=frozenset()):
    total = 0.0
    for i, q in enumerate(queries.tolist()):
        scores = {
            n: cosine(q, d) / temperature
            for n, d in enumerate(documents.tolist())
            if (i, n) not in left_out
        }
        total -= math.log(math.exp(scores[i]) / sum(map(math.exp, scores.values())))
    return total


@pytest.mark.parametrize("num_negatives", [0, 2])
def test_the_loss_is_cross_entropy_over_documents(num_negatives):
    q, d, targets = make_batch(num_negatives=num_negatives)
    parts = ContrastiveLoss()(q, d, targets, 0.2)
    assert parts.loss_sum.item() == pytest.approx(
        plain_loss(q.vectors_ND, d.vectors_ND, 0.2), rel=1e-9
    )
    assert parts.num_labels == 5
    best = [
        max(range(len(d.vectors_ND)), key=lambda n: cosine(v, d.vectors_ND[n].tolist()))
        for v in q.vectors_ND.tolist()
    ]
    assert parts.num_correct == sum(b == i for i, b in enumerate(best))


def test_both_directions_and_prefixes_are_means_of_single_losses():
    q, d, targets = make_batch(num_negatives=1)
    parts = ContrastiveLoss(symmetric=True, matryoshka_dims=(2, 4))(q, d, targets, 0.3)
    total = 0.0
    for width in (2, 4, 8):
        qs, ds = q.vectors_ND[:, :width], d.vectors_ND[:, :width]
        total += (plain_loss(qs, ds, 0.3) + plain_loss(ds[:5], qs, 0.3)) / 2
    assert parts.loss_sum.item() == pytest.approx(total / 3, rel=1e-9)


def test_autocast_rounds_no_cosines():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(32, 16, generator=generator, requires_grad=True)
    d = (q.detach() + torch.randn(32, 16, generator=generator)).requires_grad_()
    groups, grads = torch.arange(32), []
    for on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            parts = ContrastiveLoss(symmetric=True)(
                EmbeddedTexts(q, groups), EmbeddedTexts(d, groups), groups, 0.05
            )
        grads.append(torch.autograd.grad(parts.loss_sum, (q, d)))
    for full, cast in zip(*grads):
        assert (cast - full).norm() < 1e-5 * full.norm()


def test_a_known_answer_is_not_pushed_away_in_either_direction():
    q, d, targets = make_batch()
    same = torch.tensor([0, 1, 2, 3, 0])  # the first and the last row answer each other
    rule = ContrastiveLoss(symmetric=True)
    parts = rule(EmbeddedTexts(q.vectors_ND, same), EmbeddedTexts(d.vectors_ND, same), targets, 0.2)
    left_out = {(0, 4), (4, 0)}
    expected = (
        plain_loss(q.vectors_ND, d.vectors_ND, 0.2, left_out)
        + plain_loss(d.vectors_ND, q.vectors_ND, 0.2, left_out)
    ) / 2
    assert parts.loss_sum.item() == pytest.approx(expected, rel=1e-9)
    grad = torch.autograd.grad(
        info_nce(torch.eye(2), torch.tensor([0, 1]))[0] * 0 + parts.loss_sum, d.vectors_ND
    )[0]
    assert torch.isfinite(grad).all()


def test_a_margin_masks_suspected_answers():
    cosines = torch.tensor([[0.5, 0.61, 0.59, 0.4]])
    forbidden = false_negative_mask(
        cosines, torch.tensor([0]), torch.arange(4), torch.tensor([0]), margin=0.1
    )
    assert forbidden.tolist() == [[False, True, False, False]]
    none = false_negative_mask(cosines, torch.tensor([0]), torch.arange(4), torch.tensor([0]))
    assert not none.any()


def test_blanks_count_neither_as_queries_nor_as_documents():
    q, d, targets = make_batch(4)
    groups = torch.tensor([0, 1, 2, -1])
    blank_targets = torch.tensor([0, 1, 2, -100])
    rule = ContrastiveLoss(symmetric=True, false_negative_margin=0.5)
    with_blank = rule(
        EmbeddedTexts(q.vectors_ND, groups), EmbeddedTexts(d.vectors_ND, groups), blank_targets, 0.1
    )
    three = [EmbeddedTexts(e.vectors_ND[:3], groups[:3]) for e in (q, d)]
    alone = rule(*three, targets[:3], 0.1)
    assert with_blank.loss_sum.item() == pytest.approx(alone.loss_sum.item(), rel=1e-9)
    assert with_blank.num_labels == 3 and with_blank.num_correct == alone.num_correct
    grads = torch.autograd.grad(with_blank.loss_sum, (q.vectors_ND, d.vectors_ND))
    assert all(torch.isfinite(g).all() and (g[3] == 0).all() for g in grads)


def test_two_processes_add_up_to_the_one_batch():
    q, d, targets = make_batch(6)
    rule = ContrastiveLoss(symmetric=True, matryoshka_dims=(4,))
    full = rule(q, d, targets, 0.1)
    halves = []
    for rank in range(2):
        numbers = torch.arange(3) + 3 * rank
        mine = EmbeddedTexts(q.vectors_ND[numbers], q.groups_N[numbers])
        halves.append(rule(mine, d, numbers, 0.1, all_queries=q, first_query=3 * rank))
    assert sum(h.loss_sum for h in halves).item() == pytest.approx(full.loss_sum.item(), rel=1e-9)
    grads = [torch.autograd.grad(loss, (q.vectors_ND, d.vectors_ND), retain_graph=True)
             for loss in (full.loss_sum, sum(h.loss_sum for h in halves))]  # fmt: skip
    for first, second in zip(*grads):
        torch.testing.assert_close(first, second)


def test_distillation_is_zero_at_the_teacher_and_pulls_towards_it():
    teacher = torch.tensor([[0.9, 0.1, 0.3], [0.5, 0.4, 0.2]])
    for distillation in ("kl", "margin_mse"):
        student = torch.zeros(2, 3, requires_grad=True)
        assert distillation_loss(teacher, teacher, 0.1, distillation).abs() < 1e-6
        far = distillation_loss(student, teacher, 0.1, distillation)
        near = distillation_loss(
            student - 0.05 * torch.autograd.grad(far, student)[0], teacher, 0.1, distillation
        )
        assert 0 < near < far
    p = torch.softmax(teacher / 0.5, 1)
    expected = (p * (p.log() - math.log(1 / 3))).sum().item()
    assert distillation_loss(torch.zeros(2, 3), teacher, 0.5).item() == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.parametrize("distillation", ["kl", "margin_mse"])
def test_each_pair_is_distilled_by_its_own_number_of_candidates(distillation):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (
        torch.rand(6, 4, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    student.requires_grad_()
    temperature = torch.tensor(
        0.2, dtype=torch.float64, requires_grad=True
    )  # as where it is learnt
    counts = [
        4,
        3,
        2,
        1,
        0,
    ]  # candidates of the first five pairs: the last two have nothing to compare
    for pair, count in enumerate(counts):
        teacher[pair, count:] = -torch.inf
    teacher[5, 0] = -torch.inf  # a pair without its positive's score
    full = distillation_loss(student, teacher, temperature, distillation)
    alone = sum(distillation_loss(student[n:n + 1, :count], teacher[n:n + 1, :count], temperature, distillation)
                for n, count in enumerate(counts) if count > 1)  # fmt: skip
    torch.testing.assert_close(full, alone)
    used = (student, temperature) if distillation == "kl" else (student,)
    for grad, expected in zip(torch.autograd.grad(full, used), torch.autograd.grad(alone, used)):
        assert torch.isfinite(grad).all()
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize(
    "options, word",
    [
        ({"matryoshka_dims": (0,)}, "matryoshka_dims"),
        ({"matryoshka_dims": (4, 4)}, "matryoshka_dims"),
        ({"false_negative_margin": 3.0}, "margin=3.0"),
    ],
)
def test_wrong_loss_options_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        ContrastiveLoss(**options)


def test_similarity_loss_compares_each_two_pairs():
    generator = torch.Generator().manual_seed(0)
    cosines = torch.rand(7, generator=generator, dtype=torch.float64, requires_grad=True)
    grades = torch.tensor([3.0, 0, 5, 3, 1, 5, 0], dtype=torch.float64)
    counts = torch.tensor([True] * 6 + [False])
    sums = similarity_loss(cosines, grades, counts, 0.1)
    pairs = [(i, j) for i in range(6) for j in range(6) if grades[i] > grades[j]]
    terms = [math.exp((cosines[j] - cosines[i]).item() / 0.1) for i, j in pairs]
    assert sums.mean().item() == pytest.approx(math.log(1 + sum(terms)))
    in_order = sum(bool(cosines[i] > cosines[j]) for i, j in pairs) / len(pairs)
    assert (sums.num_correct / sums.num_labels).item() == pytest.approx(in_order)
    (gradient,) = torch.autograd.grad(sums.loss_sum, cosines)
    assert gradient.isfinite().all() and gradient[6] == 0
    equal = similarity_loss(cosines, torch.ones(7), counts, 0.1)
    assert equal.loss_sum == 0 and torch.autograd.grad(equal.loss_sum, cosines)[0].eq(0).all()
