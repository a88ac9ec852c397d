"""The best validation's weights: which one it is, and that nothing that happens to a run changes them. about 3 s."""

from __future__ import annotations

import pytest
import torch

from athanor.base.errors import Interrupted
from athanor.training.best import Best, by_stops_and_loss
from tests.training import micro


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run that keeps its last weights, and those that it had at each validation."""
    torch.set_flush_denormal(True)
    seen = {}

    def validate(model):
        scores = micro.validate(model)
        seen[scores["score"]] = [weight.detach().clone() for weight in model.parameters()]
        return scores

    model, result = micro.run(tmp_path_factory.mktemp("plain"), hooks={"validate": validate})
    assert result.chosen_step == result.steps == 24
    return result, {row["step"]: seen[row["scores"]["score"]] for row in result.validations}


@pytest.mark.parametrize("step", [5, 15, 24])
def test_the_model_ends_with_the_weights_of_the_validation_that_ranks_highest(tmp_path, plain, step):
    whole, weights = plain
    (score,) = [row["scores"]["score"] for row in whole.validations if row["step"] == step]
    model, result = micro.run(tmp_path, selection_key=micro.near(score))
    assert result.chosen_step == step and result.chosen["scores"] == {"score": score}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights[step], strict=True))
    # Training itself goes on from the newest weights.
    assert result.curve == whole.curve and result.validations == whole.validations


def test_stopped_before_or_after_the_best_the_weights_are_the_same(tmp_path, plain):
    score = plain[0].validations[2]["scores"]["score"]
    expected = micro.outcome(*micro.run(tmp_path / "whole", selection_key=micro.near(score)))
    for stops in (12, 17):
        asked = []
        hooks = {"should_stop": lambda asked=asked, stops=stops: asked.append(1) or len(asked) == stops}
        folder = tmp_path / str(stops)
        with pytest.raises(Interrupted):
            micro.run(folder, hooks=hooks, selection_key=micro.near(score))
        assert micro.outcome(*micro.run(folder, selection_key=micro.near(score))) == expected
        # Finished: nothing is trained again, and the weights are there.
        assert micro.outcome(*micro.run(folder, selection_key=micro.near(score))) == expected


def test_of_equals_the_later_one_is_kept():
    best = Best()
    for step, rank in ((1, [0.5, 1.0]), (2, [0.5, 1.0]), (3, [0.5, 0.9]), (4, [0.4, 9.0])):
        best.update(step, rank, micro.make_model(step), keep=True)
    assert best.step == 2
    model = micro.make_model(9)
    best.restore_into(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), micro.make_model(2).parameters(), strict=True))


def test_what_does_not_stop_is_never_the_best():
    rank = by_stops_and_loss(0.99)
    good, stops_less, worse, broken = (
        rank({"loss": loss, "stop_rate": stops}) for loss, stops in ((0.5, 0.991), (0.1, 0.98), (0.6, 1.0), (None, 1.0))
    )
    assert sorted([stops_less, worse, broken, good]) == [broken, stops_less, worse, good]
