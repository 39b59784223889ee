"""The parts of a training: groups from likeness, PCA, losses and rates against what one computes by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from harness.llapor import network
from harness.llapor.groups import Likeness, find_groups, likeness_of
from harness.llapor.learning import ends_loss, plain_loss, rarity_of, rate_at
from harness.llapor.settings import ENDS, MIDDLE
from harness.llapor.shape import PredictorShape, shape_of
from tests.unit.study.texts import random_text


def test_groups_are_where_the_layers_change():
    cosine = [0.4, 0.5, 0.95, 0.97, 0.96, 0.94, 0.6]
    followed = [0.7, 0.65, 0.4, 0.42, 0.41, 0.43, 0.7]
    found = find_groups(Likeness(np.array(cosine), np.array(followed)))
    assert found == ["input"] * 2 + ["middle"] * 4 + ["output"]


def test_layers_that_are_all_alike_are_mostly_in_the_middle():
    alike = Likeness(np.full(6, 0.9), np.full(6, 0.5))
    assert find_groups(alike) == ["input", *["middle"] * 4, "output"]
    assert find_groups(Likeness(np.array([0.1, 0.9]), np.array([0.5, 0.5]))) == ["middle", "middle"]


def test_likeness_is_the_mean_cosine_of_successive_inputs():
    text = random_text(0, lengths=(1,) * 30)
    inputs = np.random.default_rng(0).normal(size=(30, 3, 8)).astype(np.float16)
    found = likeness_of(text, inputs)
    wide = inputs.astype(np.float64)
    wide /= np.linalg.norm(wide, axis=2, keepdims=True)
    expected = [(wide[:, layer] * wide[:, layer + 1]).sum(axis=1).mean() for layer in range(2)]
    assert found.cosine == pytest.approx(expected, abs=1e-3)


def test_principal_components_keep_the_most_variance():
    rng = np.random.default_rng(1)
    wide = rng.normal(size=(500, 10)) * np.linspace(5, 0.1, 10) @ np.linalg.qr(rng.normal(size=(10, 10)))[0] + 3.0
    projection, offset = network.fit_pca(torch.from_numpy(wide), 4)
    reduced = wide @ projection.numpy().T - offset.numpy()
    assert reduced.mean(axis=0) == pytest.approx(0, abs=1e-4)
    assert reduced.var(axis=0).sum() == pytest.approx(4, rel=1e-4)
    largest = np.linalg.eigvalsh(np.cov(wide.T, bias=True))[::-1][:4]
    assert reduced.var(axis=0) == pytest.approx(4 * largest / largest.sum(), rel=1e-3)
    assert np.corrcoef(reduced.T) == pytest.approx(np.eye(4), abs=1e-3)


def test_losses_are_as_in_the_paper():
    logits = torch.tensor([[0.3, -1.2, 2.0], [0.0, 1.0, -0.5]])
    target = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    rarity = rarity_of(target)
    assert rarity.tolist() == pytest.approx([0.6, 1.2, 1.2])  # chosen 2, 1 and 0 times
    balanced = focal = plain = 0.0
    for row in range(2):
        for e in range(3):
            p = 1 / (1 + math.exp(-logits[row, e].item()))
            true = p if target[row, e] else 1 - p
            plain -= math.log(true) / 6
            balanced -= rarity[e].item() * math.log(true) / 6
            focal -= (1 - true) ** 2 * math.log(true) / 6
    assert float(plain_loss(logits, target)) == pytest.approx(plain, rel=1e-5)
    assert float(ends_loss(logits, target, rarity, 0.3, 2.0)) == pytest.approx(0.3 * balanced + 0.7 * focal, rel=1e-5)


def test_the_rate_warms_up_for_five_epochs_and_falls_along_a_cosine():
    assert [rate_at(epoch, 30, ENDS) for epoch in (2.5, 5, 17.5, 30)] == pytest.approx([5e-4, 1e-3, 5e-4, 0], abs=1e-9)
    assert rate_at(0.1, 30, MIDDLE) == rate_at(29.0, 30, MIDDLE) == 2e-3


@pytest.mark.parametrize("is_deep", [False, True])
def test_the_layout_holds_the_network(is_deep):
    """A shape is found again from its layout; features are the routing beside the reduced hidden state."""
    shape = PredictorShape(hidden_dim=10, num_experts=6, pca_dims=4, width=8, is_deep=is_deep)
    assert shape_of(shape.layout()) == shape
    w = network.initial(shape, 0) | {"pca": torch.ones(4, 10), "pca_offset": torch.arange(4.0)}
    ids, weights = torch.tensor([[5, 1]]), torch.tensor([[1.5, 0.5]])
    reduced, routed = network.features(w, torch.ones(1, 10), ids, weights)
    assert reduced.tolist() == [[10.0, 9.0, 8.0, 7.0]]
    assert routed.tolist() == [[0, 1, 0, 0, 0, 1, 0, 0.25, 0, 0, 0, 0.75]]
    assert network.logits(w, reduced, routed).shape == (1, 6)
    matrices = 4 * 10 + 8 * 16 + 6 * 8 + (8 * 4 + 2 * 8 * 8 if is_deep else 0)
    assert shape.flops_per_token == 2 * matrices
