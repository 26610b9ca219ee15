"""Judges that run in this process: the rule alone, or beside a vision-language model's chain of thought.


A tiny random model cannot judge, but it costs what a judge costs: vision encoding, prefill, and one decode
step per token for a whole batch at once. So TinyVlmJudge decodes a reply of forced length for every request
and takes the reward from the rule. It does not know advantages, groups, or where it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from stagebreaker.executor.rewards.protocol import Outcome, Request, Scored
from stagebreaker.executor.rewards.rules import rule_outcome

_QUESTION = "Prompt: {prompt}\nJudge the video step by step."
_PAIR_QUESTION = "Prompt: {prompt}\nThe first half shows video A, the second half video B. Compare them step by step."


class RuleJudge:
    """The rule of rules.py, with no model."""

    def score(self, requests: Sequence[Request]) -> list[Outcome]:
        return [rule_outcome(request) for request in requests]


class TinyVlmJudge:
    """The rule's reward, at the cost of a chain of thought of exactly cot_tokens tokens per request.

    n_frames frames of each video are shown to the model. The words carry no meaning and do not touch the
    reward: they are there for their cost, and are kept in the score's meta. One batch, greedy, padded on the
    left; an unscorable request stays out of the batch.
    """

    def __init__(self, model: Any, processor: Any, cot_tokens: int = 64, n_frames: int = 4) -> None:
        if cot_tokens < 1 or n_frames < 1:
            raise ValueError(f"cot_tokens={cot_tokens} and n_frames={n_frames} must be >= 1")
        if processor.tokenizer.padding_side != "left":
            raise ValueError("the judge's tokenizer must pad on the left; set tokenizer.padding_side")
        self.model, self.processor = model, processor
        self.cot_tokens, self.n_frames = cot_tokens, n_frames

    def score(self, requests: Sequence[Request]) -> list[Outcome]:
        outcomes = RuleJudge().score(requests)
        scorable = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Scored)]
        replies = self._think([requests[i] for i in scorable]) if scorable else []
        for i, reply in zip(scorable, replies, strict=True):
            outcome = outcomes[i]
            assert isinstance(outcome, Scored)
            outcomes[i] = replace(outcome, meta={"reply": reply, "tokens": self.cot_tokens})
        return outcomes

    @torch.no_grad()
    def _think(self, requests: Sequence[Request]) -> list[str]:
        texts, images = [], []
        for request in requests:
            shown = [Image.fromarray(f) for video in request.frames for f in sample_frames(video, self.n_frames)]
            question = (_QUESTION if len(request.frames) == 1 else _PAIR_QUESTION).format(prompt=request.prompt)
            content = [{"type": "image"} for _ in shown] + [{"type": "text", "text": question}]
            texts.append(
                self.processor.apply_chat_template(
                    [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
                )
            )
            images.append(shown)
        inputs = self.processor(text=texts, images=images, padding=True, return_tensors="pt").to(self.model.device)
        tokenizer = self.processor.tokenizer
        ids_BT = self.model.generate(
            **inputs,
            do_sample=False,
            min_new_tokens=self.cot_tokens,
            max_new_tokens=self.cot_tokens,
            suppress_tokens=tokenizer.all_special_ids,  # image tokens without images would be meaningless
            pad_token_id=tokenizer.pad_token_id,
        )
        replies: list[str] = tokenizer.batch_decode(ids_BT[:, inputs["input_ids"].shape[1] :])
        return replies


def sample_frames(video: np.ndarray, n_frames: int) -> np.ndarray:
    """n_frames frames at even distances from the first to the last (repeated if the video is shorter)."""
    picks = np.linspace(0, len(video) - 1, n_frames).round().astype(int)
    sampled: np.ndarray = video[picks]
    return sampled
