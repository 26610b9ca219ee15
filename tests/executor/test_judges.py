"""Judges: outcome i belongs to request i, the same in any batch; what cannot be scored is never a 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stagebreaker.executor.models.load import load_judge_model, load_vae
from stagebreaker.executor.rewards.judges import RuleJudge, TinyVlmJudge, sample_frames
from stagebreaker.executor.rewards.protocol import Judge, Request, Scored, Unscorable
from stagebreaker.executor.rewards.rules import rule_dims, rule_value

COT = 12


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def vlm() -> TinyVlmJudge:
    return TinyVlmJudge(*load_judge_model("tiny"), cot_tokens=COT, n_frames=3)


@pytest.fixture(params=["rule", "vlm"])
def judge(request: pytest.FixtureRequest, vlm: TinyVlmJudge) -> Judge:
    return RuleJudge() if request.param == "rule" else vlm


def video(seed: int, frames: int = 5, side: int = 32) -> np.ndarray:
    generator = np.random.default_rng(seed)
    start = generator.integers(0, 200, size=(1, side, side, 3))
    drift = generator.integers(0, 12, size=(frames, 1, 1, 1)).cumsum(axis=0)
    return (start + drift).clip(0, 255).astype(np.uint8)


def pointwise(seed: int, prompt: str = "A red kite dives.") -> Request:
    return Request(f"candidate {seed}", (video(seed),), prompt)


def values(outcomes: list[Any]) -> list[float]:
    assert all(isinstance(o, Scored) for o in outcomes)
    return [o.value for o in outcomes]


def test_outcomes_follow_requests_whatever_the_batch(judge: Judge) -> None:
    requests = [pointwise(i, prompt="go " * (1 + 5 * i)) for i in range(4)]
    together = judge.score(requests)
    assert len(set(values(together))) == 4
    assert all(0 <= v <= 1 for v in values(together))
    assert values(judge.score(requests[::-1])) == values(together)[::-1]
    assert [values(judge.score([r]))[0] for r in requests] == values(together)
    assert judge.score(requests) == together


def test_value_is_the_mean_of_the_dims(judge: Judge) -> None:
    (outcome,) = judge.score([pointwise(1)])
    assert isinstance(outcome, Scored)
    assert outcome.dims == rule_dims(video(1))
    assert outcome.value == rule_value(outcome.dims)


def test_pairs(judge: Judge) -> None:
    first, second = video(1), video(2)
    better = rule_value(rule_dims(first)) > rule_value(rule_dims(second))
    requests = [
        Request("a", (first, second), "p"),
        Request("b", (second, first), "p"),
        Request("c", (first, first.copy()), "p"),
        pointwise(3),
    ]
    assert values(judge.score(requests))[:3] == [float(better), float(not better), 0.5]


def test_unscorable_says_why_and_spares_the_others(judge: Judge) -> None:
    nan = video(0).astype(np.float32)
    nan[0, 0, 0, 0] = np.nan
    bad = [
        (Request("n", (nan,), "p"), "video 0 of n has pixels that are not finite"),
        (
            Request("e", (np.zeros((0, 8, 8, 3), np.uint8),), "p"),
            "video 0 of e is empty (shape (0, 8, 8, 3))",
        ),
        (Request("s", (np.zeros((4, 8, 8), np.uint8),), "p"), "must be [n_frames, height, width, 3]"),
        (Request("f", (np.zeros((4, 8, 8, 3)),), "p"), "dtype float64, must be uint8"),
        (Request("d", (video(0), video(1, frames=4)), "p"), "videos of d differ in shape"),
    ]
    requests = [r for pair in ((b, pointwise(i)) for i, (b, _) in enumerate(bad)) for r in pair]
    outcomes = judge.score(requests)
    for outcome, (_, reason) in zip(outcomes[::2], bad, strict=True):
        assert isinstance(outcome, Unscorable)
        assert reason in outcome.reason
    assert outcomes[1::2] == judge.score(requests[1::2])
    assert judge.score([bad[0][0]]) == [outcomes[0]]
    assert judge.score([]) == []


def test_chain_of_thought_has_the_forced_length(vlm: TinyVlmJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[tuple[int, int]] = []
    generate = vlm.model.generate

    def spy(**inputs: Any) -> Any:
        ids = generate(**inputs)
        lengths.append((ids.shape[0], ids.shape[1] - inputs["input_ids"].shape[1]))
        new = ids[:, inputs["input_ids"].shape[1] :]
        assert not torch.isin(new, torch.tensor(vlm.processor.tokenizer.all_special_ids)).any()
        return ids

    monkeypatch.setattr(vlm.model, "generate", spy)
    outcomes = vlm.score([pointwise(i, prompt="go " * (1 + 20 * i)) for i in range(3)])
    assert lengths == [(3, COT)]
    for outcome in outcomes:
        assert isinstance(outcome, Scored)
        assert outcome.meta["tokens"] == COT
        assert outcome.meta["reply"]


def test_frames_are_sampled_from_end_to_end() -> None:
    ramp = np.arange(33)
    assert sample_frames(ramp, 5).tolist() == [0, 8, 16, 24, 32]
    assert sample_frames(ramp[:1], 3).tolist() == [0, 0, 0]
    assert sample_frames(ramp, 1).tolist() == [0]


def test_rule_dims_mean_what_they_say() -> None:
    black, white = np.zeros((3, 8, 8, 3), np.uint8), np.full((3, 8, 8, 3), 255, np.uint8)
    assert rule_dims(black) == {"brightness": 0.0, "contrast": 0.0, "smoothness": 1.0}
    assert rule_dims(white)["brightness"] == 1.0
    flicker = np.concatenate([black[:1], white[:1]])
    assert rule_dims(flicker)["smoothness"] == pytest.approx(1 / 21)
    half = black.copy()
    half[:, :4] = 255
    assert rule_dims(half)["contrast"] > 0.9


def test_the_rule_can_be_learned_through_the_tiny_vae() -> None:
    """Brightness follows the mean of the latents by more than it varies between seeds, and is not clipped."""
    decoder = load_vae("tiny")

    def dims(seed: int, shift: float) -> dict[str, float]:
        latents = torch.randn(1, 16, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        return rule_dims(decoder.decode(latents + shift))

    down, plain, up = ([dims(seed, shift) for seed in range(4)] for shift in (-0.2, 0.0, 0.2))
    assert len({rule_value(d) for d in plain}) == 4
    assert max(d["brightness"] for d in down) < min(d["brightness"] for d in plain)
    assert max(d["brightness"] for d in plain) < min(d["brightness"] for d in up)
    assert all(0.2 < d["brightness"] < 0.8 for d in (*down, *plain, *up))


def test_outcomes_are_validated() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be finite; return Unscorable instead"):
            Scored(bad)
        with pytest.raises(ValueError, match="motion="):
            Scored(0.5, {"motion": bad})
    with pytest.raises(ValueError, match="needs a reason"):
        Unscorable(" ")
    with pytest.raises(ValueError, match="request x has 3 videos"):
        Request("x", (video(0),) * 3, "p")


def test_judge_arguments_are_checked() -> None:
    model, processor = load_judge_model("tiny")
    with pytest.raises(ValueError, match="cot_tokens=0"):
        TinyVlmJudge(model, processor, cot_tokens=0)
    processor.tokenizer.padding_side = "right"
    with pytest.raises(ValueError, match="must pad on the left"):
        TinyVlmJudge(model, processor)
