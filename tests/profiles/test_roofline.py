"""Roofline: the formulas against worked values, what grows with what, and that a predicted profile plans a step."""

from dataclasses import replace

import pytest
from builders import placement_of, simulated
from hypothesis import given, settings
from hypothesis import strategies as st

from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.judges import JUDGES, QWEN3_VL_8B, QWEN25_VL_7B, find_judge
from stagebreaker.profiles.models import (
    MODELS,
    UMT5_XXL,
    WAN21_VAE,
    WAN22_VAE,
    WAN_1_3B,
    WAN_5B,
    Clip,
    Dit,
    Lora,
    Passes,
    activation_bytes,
    block_activation_bytes,
    context_refresh,
    find_model,
    grad_activation_bytes,
    grad_replay,
    replay,
    rollout,
)
from stagebreaker.profiles.roofline import (
    SCORE_BATCHES,
    HardwareTable,
    decode_s,
    encode_prompt_s,
    forward_s,
    hardware_table,
    most_requests,
    passes_s,
    predicted_profile,
    token_step_s,
    verdict_s,
)
from stagebreaker.profiles.table import DATA_KINDS, MEMORY_KINDS, TASK_KINDS, Profile
from stagebreaker.sim.serving import Lazy, TokenService, draw_tokens, serve_all_us, turns_of
from stagebreaker.sim.workload import load_workload

TERA, GIGA = 10**12, 10**9
TABLE = hardware_table()
PRO, H100, H200 = (TABLE.find(name) for name in ("rtx-pro-5000-72gb", "h100-80gb", "h200-141gb"))
ATTENTION, ALL = ("to_q", "to_k", "to_v", "to_out.0"), ("all-linear",)
SIZES = {"360p": (352, 640), "480p": (480, 832), "720p": (704, 1280)}
LORA_64 = Lora(64, ALL)


def clip_of(model="wan2.1-1.3b-self-forcing", frames=21, size="480p", chunk=3):
    return Clip(find_model(model), frames, chunk, *SIZES[size])


def one_pass(chunks):
    return Passes((1,) * chunks, (0,) * chunks)


def tera(flop):
    return flop / TERA


# -- DiT forward and passes: FLOPs ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "total", "share"),
    [
        (0, 16.2, 0.28),
        (1, 20.2, 0.42),
        (2, 24.3, 0.52),
        (3, 28.3, 0.59),
        (4, 32.3, 0.64),
        (5, 36.4, 0.68),
        (6, 40.4, 0.71),
    ],
)
def test_forward_of_a_chunk_at_480p(chunk, total, share):
    forward = clip_of().forward(chunk)
    assert tera(forward.total) == pytest.approx(total, abs=0.05)
    assert (forward.attention + forward.cross) / forward.total == pytest.approx(share, abs=0.005)
    assert tera(forward.linear) == pytest.approx(11.70, abs=0.01)
    assert tera(forward.cross) == pytest.approx(0.44, abs=0.005)


def test_a_full_window_stops_the_growth():
    costs = [clip_of("longlive-1.3b", 33).forward(n).total for n in range(11)]
    assert costs[:4] == [clip_of().forward(n).total for n in range(4)]
    assert set(costs[3:]) == {costs[3]}


@pytest.mark.parametrize(
    ("model", "frames", "total"),
    [
        ("wan2.1-1.3b-self-forcing", 21, 198),
        ("wan2.1-1.3b-self-forcing", 33, 360),
        ("wan2.1-1.3b-self-forcing", 45, 521),
        ("longlive-1.3b", 21, 174),
        ("longlive-1.3b", 33, 287),
        ("longlive-1.3b", 45, 400),
    ],
)
def test_one_pass_over_a_video(model, frames, total):
    clip = clip_of(model, frames)
    assert tera(one_pass(clip.chunks).flop(clip)) == pytest.approx(total, abs=0.5)


def test_a_rollout_is_one_pass_more_than_its_steps():
    assert tera(rollout(7, 4).flop(clip_of())) == pytest.approx(990, abs=0.5)
    assert tera(rollout(11, 4).flop(clip_of("longlive-1.3b", 33))) == pytest.approx(1435, abs=0.5)


def test_360p_has_880_tokens_a_frame():
    clip = clip_of(size="360p")
    forward = clip.forward(0)
    assert (clip.tokens_per_frame, clip_of().tokens_per_frame) == (880, 1560)
    assert tera(forward.linear + forward.cross) == pytest.approx(6.85, abs=0.005)
    assert tera(forward.attention) == pytest.approx(1.28, abs=0.005)
    assert tera(one_pass(7).flop(clip)) == pytest.approx(84, abs=0.5)


@pytest.mark.parametrize(
    ("size", "chunk", "tokens", "fixed", "per_chunk"),
    [("480p", 3, 390, 10.4, 0.50), ("480p", 8, 390, 27.7, 3.59), ("720p", 8, 880, 62.4, 18.3)],
)
def test_5b(size, chunk, tokens, fixed, per_chunk):
    clip = clip_of("longlive-5b", 24, size, chunk)
    assert clip.tokens_per_frame == tokens
    for n in range(3):
        forward = clip.forward(n)
        assert tera(forward.linear + forward.cross) == pytest.approx(fixed, abs=0.06)
        assert tera(forward.attention) == pytest.approx(per_chunk * (n + 1), rel=0.01)


@pytest.mark.parametrize(("rank", "more"), [(64, 0.82), (128, 1.64), (256, 3.28)])
def test_what_a_lora_adds_to_a_forward(rank, more):
    assert tera(clip_of().forward(0, Lora(rank, ALL)).lora) == pytest.approx(more, abs=0.005)
    assert clip_of().forward(0).lora == 0


# -- backward and replays ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "ratio", "without_cached"), [(0, 1.45, 1.45), (3, 1.9, 1.5), (6, 2.06, 1.5)], ids=["n=0", "n=3", "n=6"]
)
def test_backward_over_forward(chunk, ratio, without_cached):
    forward = clip_of().forward(chunk, LORA_64)
    assert forward.backward() / forward.total == pytest.approx(ratio, rel=0.01)
    assert forward.backward(cached_kv_gradient=False) / forward.total == pytest.approx(without_cached, rel=0.025)


def test_backward_makes_no_gradient_of_the_frozen_base():
    forward = replace(clip_of().forward(0, LORA_64), attention_own=0, attention_cached=0, cross=0, lora=0)
    assert forward.backward() == forward.total


def test_passes_of_each_task():
    assert rollout(3, 4) == Passes((5, 5, 5), (0, 0, 0))
    assert context_refresh(3) == Passes((1, 1, 0), (0, 0, 0))
    assert replay(3, 4) == Passes((5, 5, 4), (0, 0, 0))
    assert grad_replay(3, 2, 2) == Passes((3, 3, 2), (2, 2, 2))
    assert grad_replay(3, 2, 4) == Passes((5, 5, 4), (2, 2, 2))
    assert grad_replay(3, 2, 4, checkpointing=True) == Passes((7, 7, 6), (2, 2, 2))


@pytest.mark.parametrize(("trained", "value"), [(0, 4), (5, 4)])
def test_more_trained_steps_than_values_are_refused(trained, value):
    with pytest.raises(InputError, match=rf"trained_steps={trained} must be in 1\.\.4"):
        grad_replay(7, trained, value)


@pytest.mark.parametrize(("chunk", "units"), [(0, 3.45), (3, 3.9), (6, 4.06)])
def test_checkpointing_forwards_again(chunk, units):
    """A trained step of one chunk in units of its forward."""
    clip, only = clip_of(), [int(c == chunk) for c in range(7)]
    made = grad_replay(7, 1, 1, checkpointing=True)
    forwards = tuple(f * here for f, here in zip((2,) * 7, only, strict=True))
    assert made.forwards == (3,) * 6 + (2,)
    total = Passes(forwards, tuple(only)).flop(clip, LORA_64)
    assert total / clip.forward(chunk, LORA_64).total == pytest.approx(units, rel=0.01)


# -- VAE, text encoder, bytes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "size", "frames", "total"),
    [
        ("wan2.1-1.3b-self-forcing", "480p", 1, 4.35),
        ("wan2.1-1.3b-self-forcing", "480p", 21, 275),
        ("wan2.1-1.3b-self-forcing", "480p", 33, 438),
        ("wan2.1-1.3b-self-forcing", "480p", 45, 601),
        ("wan2.1-1.3b-self-forcing", "360p", 21, 275.35 * 352 * 640 / 399_360),
        ("longlive-5b", "480p", 21, 9.1 + 29.4 * 20),
        ("longlive-5b", "720p", 21, 20.6 + 66.4 * 20),
    ],
)
def test_vae_decode(model, size, frames, total):
    assert tera(find_model(model).vae.decode_flop(frames, *SIZES[size])) == pytest.approx(total, rel=0.002)


def test_text_encoder():
    assert UMT5_XXL.parameters / GIGA == pytest.approx(4.63, abs=0.005)
    assert tera(UMT5_XXL.encode_flop(512)) == pytest.approx(4.8, abs=0.05)


@pytest.mark.parametrize(
    ("dit", "rank", "targets", "millions"),
    [
        (WAN_1_3B, 32, ATTENTION, 23.6),
        (WAN_1_3B, 64, ATTENTION, 47.2),
        (WAN_1_3B, 128, ATTENTION, 94.4),
        (WAN_1_3B, 64, ALL, 87.5),
        (WAN_1_3B, 256, ALL, 350),
        (WAN_5B, 128, ALL, 322),
    ],
)
def test_lora_parameters(dit, rank, targets, millions):
    assert Lora(rank, targets).parameters(dit) / 1e6 == pytest.approx(millions, rel=0.003)


def test_all_linear_is_all_six_and_others_are_refused():
    six = (*ATTENTION, "ffn.net.0.proj", "ffn.net.2")
    assert Lora(8, six).parameters(WAN_1_3B) == Lora(8, ALL).parameters(WAN_1_3B)
    with pytest.raises(InputError, match=r"'to_w'; did you mean 'to_"):
        Lora(8, ("to_w",)).parameters(WAN_1_3B)
    for targets in ((), ("to_q", "to_q")):
        with pytest.raises(InputError, match="each layer once, and at least one"):
            Lora(8, targets).parameters(WAN_1_3B)


def test_cache_bytes():
    assert (WAN_1_3B.kv_bytes_per_token, WAN_5B.kv_bytes_per_token) == (184_320, 368_640)
    assert clip_of().kv_cache_bytes() / GIGA == pytest.approx(6.04, abs=0.005)
    assert clip_of("longlive-1.3b", 33).kv_cache_bytes() / GIGA == pytest.approx(3.45, abs=0.005)
    assert clip_of(frames=33).kv_cache_bytes(33) / GIGA == pytest.approx(9.49, abs=0.005)


def test_weight_and_activation_bytes():
    assert 2 * WAN_1_3B.parameters / GIGA == pytest.approx(2.84, abs=0.01)
    assert WAN_5B.parameters / GIGA == pytest.approx(5.0, abs=0.01)
    assert activation_bytes(WAN_1_3B, 4680) / GIGA == pytest.approx(12, abs=0.1)
    assert 30 * block_activation_bytes(WAN_1_3B, 4680) == activation_bytes(WAN_1_3B, 4680)


def test_a_grad_forward_keeps_activations_and_joined_keys_and_values():
    """About 12 GB and 3.5 to 6 GB; with checkpointing the 30 inputs and one block."""
    kept = [grad_activation_bytes(WAN_1_3B, 4680, frames * 1560) / GIGA for frames in (9, 18)]
    assert kept == pytest.approx([12 + 3.45, 12 + 6.04], abs=0.1)
    checkpointed = grad_activation_bytes(WAN_1_3B, 4680, 18 * 1560, checkpointing=True) / GIGA
    assert checkpointed == pytest.approx((2 * 30 * 4680 * 1536 + (12e9 + 6.04e9) / 30) / GIGA, rel=0.01)


def test_memory_of_engines():
    """Checkpoint files: VAE 0.51 GB in fp32 (2.1), 2.8 GB (2.2); umT5-XXL encoder 11.4 GB; a 7B judge 8.3 B weights."""
    assert 4 * WAN21_VAE.parameters / GIGA == pytest.approx(0.508, rel=0.01)
    assert 4 * WAN22_VAE.parameters / GIGA == pytest.approx(2.82, rel=0.01)
    memory = predicted().memory_bytes
    assert memory["text_encoder_weights"] / GIGA == pytest.approx(11.36, rel=0.01)
    assert QWEN25_VL_7B.weight_bytes / GIGA == pytest.approx(16.6, rel=0.02)
    assert QWEN3_VL_8B.weight_bytes / GIGA == pytest.approx(17.5, rel=0.03)


def test_decoding_state_is_what_a_server_reports():
    """1.8 GiB of streaming state a session at 480x832, and room for three tensors of four frames."""
    state = WAN21_VAE.decode_bytes(480, 832) - 3 * 4 * 2 * 96 * 480 * 832
    assert state / 2**30 == pytest.approx(1.8, rel=0.05)
    assert WAN21_VAE.decode_bytes(352, 640) / WAN21_VAE.decode_bytes(480, 832) == pytest.approx(352 * 640 / 399_360)
    assert WAN22_VAE.decode_bytes(480, 832) / WAN21_VAE.decode_bytes(480, 832) == pytest.approx(256 / 4 / 96)


def test_sizes_of_a_video():
    assert clip_of().latents_bytes == 2 * 21 * 16 * 60 * 104
    assert clip_of().trajectory_bytes(4) == 5 * clip_of().latents_bytes
    assert clip_of().frames_bytes == 81 * 3 * 480 * 832
    assert clip_of("longlive-5b", 24, chunk=8).latents_bytes == 2 * 24 * 48 * 30 * 52


# -- judges --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vlm", "body", "head", "weights", "cache", "prefill", "vision"),
    [(QWEN25_VL_7B, 6.53, 0.54, 14.1, 57_344, 57, 2.5), (QWEN3_VL_8B, 6.95, 0.62, 15.1, 147_456, 62, 1.3)],
    ids=["7b", "8b"],
)
def test_vlm(vlm, body, head, weights, cache, prefill, vision):
    assert vlm.body_parameters / GIGA == pytest.approx(body, abs=0.006)
    assert vlm.head_parameters / GIGA == pytest.approx(head, abs=0.006)
    assert vlm.step_weight_bytes / GIGA == pytest.approx(weights, abs=0.05)
    assert vlm.kv_bytes_per_token == cache
    assert tera(vlm.prefill_flop(4096)) == pytest.approx(prefill, abs=0.5)
    assert tera(vlm.vit.image_flop(480, 832)) == pytest.approx(vision, abs=0.08)


@pytest.mark.parametrize(
    ("height", "width", "tokens_7b", "tokens_8b"),
    [(480, 832, 510, 390), (360, 640, 299, 220), (240, 416, 135, 104), (448, 448, 256, 196)],
)
def test_tokens_of_a_picture(height, width, tokens_7b, tokens_8b):
    assert QWEN25_VL_7B.vit.image_tokens(height, width) == tokens_7b
    assert QWEN3_VL_8B.vit.image_tokens(height, width) == tokens_8b


@pytest.mark.parametrize(
    ("hardware", "judge", "milliseconds"),
    [
        (PRO, "vr-thinker", {1: 13.4, 4: 14.0, 12: 15.7, 24: 18.3}),
        (PRO, "unified-reward-flex", {1: 14.6, 4: 16.3, 12: 20.7, 24: 27.2}),
        (H200, "vr-thinker", {1: 3.7, 4: 3.9, 12: 4.4, 24: 5.1}),
    ],
    ids=["pro5000-7b", "pro5000-8b", "h200-7b"],
)
def test_milliseconds_of_a_token_step(hardware, judge, milliseconds):
    for requests, expected in milliseconds.items():
        assert 1e3 * token_step_s(hardware, find_judge(judge), requests, 4000) == pytest.approx(expected, abs=0.05)


def test_a_long_verdict_alone_and_six_at_once():
    """Worked example: 2,000 tokens take about 33 s alone and 45 s six at a time."""
    alone, six = (verdict_s(PRO, find_judge("unified-reward-flex"), b, 2000, 480, 832) for b in (1, 6))
    assert alone == pytest.approx(33, rel=0.1)
    assert six == pytest.approx(45, rel=0.1)


def test_what_does_not_fit_waits_for_a_wave():
    judge, card = find_judge("unified-reward-flex"), TABLE.find("rtx-4090")
    most = most_requests(card, judge, 2000, 480, 832)
    full, one = (verdict_s(card, judge, b, 2000, 480, 832) for b in (most, 1))
    assert most == 4
    assert verdict_s(card, judge, 3 * most + 1, 2000, 480, 832) == pytest.approx(3 * full + one)


def test_a_judge_that_does_not_fit_is_refused():
    small = PRO.model_copy(update={"memory_bytes": PRO.memory_bytes.model_copy(update={"value": 16 * GIGA})})
    with pytest.raises(InputError, match="vr-thinker and one verdict of 1000 tokens do not fit"):
        verdict_s(small, find_judge("vr-thinker"), 1, 1000, 480, 832)


# -- durations -----------------------------------------------------------------------------------------


def test_central_values_of_a_21_frame_video():
    clip = clip_of()
    assert passes_s(PRO, clip, rollout(7, 4)) == pytest.approx(7.5, rel=0.1)
    assert decode_s(PRO, clip) == pytest.approx(3.2, rel=0.05)
    assert passes_s(PRO, clip, replay(7, 4)) == pytest.approx(7, rel=0.15)
    assert 15 < passes_s(PRO, clip, grad_replay(7, 4, 4), LORA_64) < 25
    assert encode_prompt_s(PRO) < 0.1


def test_reported_times_on_an_h100():
    """LongLive chunk times / 5 forwards (n = 0..3) within a quarter; Self-Forcing's 81 frames in 5.9 to 6.2 s."""
    clip = clip_of()
    for n, reported in enumerate((0.1190, 0.1206, 0.1368, 0.1522)):
        assert forward_s(H100, clip.forward(n).total, 0) == pytest.approx(reported, rel=0.35 if n == 0 else 0.25)
    assert passes_s(H100, clip, rollout(7, 4)) + decode_s(H100, clip) == pytest.approx(6.05, rel=0.05)


# -- properties ----------------------------------------------------------------------------------------

CLIPS = st.builds(
    lambda model, chunk, chunks, size: clip_of(model, chunk * chunks, size, chunk),
    st.sampled_from(sorted(MODELS)),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from(["360p", "480p"]),
)


@settings(deadline=None, max_examples=40)
@given(CLIPS, st.integers(1, 4), st.integers(1, 256))
def test_more_work_never_takes_less_time(clip, steps, rank):
    lora = Lora(rank, ATTENTION)

    def seconds(clip=clip, steps=steps, lora=lora, hardware=PRO):
        return passes_s(hardware, clip, grad_replay(clip.chunks, steps, steps), lora)

    longer = replace(clip, latent_frames=clip.latent_frames + clip.chunk_frames)
    wider = replace(clip, model=replace(clip.model, window_frames=clip.model.window_frames + 1))
    assert seconds() < seconds(steps=steps + 1)
    assert seconds() < seconds(clip=longer)
    assert seconds() <= seconds(clip=wider)
    assert seconds() <= seconds(lora=replace(lora, rank=rank + 1))
    assert seconds() < seconds(clip=replace(clip, height=2 * clip.height))
    assert seconds(hardware=H200) <= seconds(hardware=H100) < seconds()


@settings(deadline=None, max_examples=40)
@given(CLIPS, st.integers(1, 3), st.booleans())
def test_a_replay_with_gradients_costs_more_than_without(clip, steps, checkpointing):
    made = grad_replay(clip.chunks, steps, 4, checkpointing=checkpointing)
    assert made.flop(clip) > replay(clip.chunks, 4).flop(clip) > context_refresh(clip.chunks).flop(clip)
    assert made.flop(clip, cached_kv_gradient=False) <= made.flop(clip)
    assert rollout(clip.chunks, 4).flop(clip) - replay(clip.chunks, 4).flop(clip) == clip.forward(clip.chunks - 1).total


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize("hardware", TABLE.hardware, ids=[h.name for h in TABLE.hardware])
def test_a_batch_takes_longer_than_a_part_of_it_and_less_than_its_members(hardware, judge):
    times = [verdict_s(hardware, find_judge(judge), b, 1000, 480, 832) for b in range(1, 65)]
    assert times == sorted(times)
    assert all(t <= b * times[0] * (1 + 1e-12) for b, t in enumerate(times, 1))


# -- bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(WAN_1_3B, layers=0), "Dit: layers=0 must be at least 1"),
        (lambda: Dit(30, 1536, 12, 64, 8960), "heads=12 x head_dim=64 must be dim=1536"),
        (lambda: Lora(0, ALL), "rank=0 must be at least 1"),
        (lambda: replace(find_model("longlive-1.3b"), sink_frames=12), r"sink_frames=12 must be in 0\.\.11"),
        (lambda: clip_of(frames=22), "latent_frames=22 must be a multiple of chunk_frames=3"),
        (lambda: clip_of("longlive-1.3b", 26, chunk=13), "chunk_frames=13 must fit the window of 12"),
        (lambda: replace(clip_of("longlive-5b"), height=360), "360x832 must be multiples of 32 for longlive-5b"),
        (lambda: find_model("longlive-1b"), "did you mean 'longlive-"),
        (lambda: find_judge("vrthinker"), "did you mean 'vr-thinker'"),
        (lambda: TABLE.find("h200"), "did you mean 'h200-141gb'"),
    ],
)
def test_bad_dimensions_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


# -- hardware ------------------------------------------------------------------------------------------


def test_every_number_has_a_source_and_peaks_are_dense():
    peaks = {h.name: h.peak_flops.value / TERA for h in TABLE.hardware}
    assert peaks == {
        "rtx-pro-5000-72gb": 258,
        "rtx-4090": 165.2,
        "a100-80gb": 312,
        "h100-80gb": 989,
        "h200-141gb": 989,
    }
    assert PRO.peak_flops.derived
    assert not H200.memory_bytes_per_s.derived
    assert HardwareTable.parse(TABLE.model_dump(mode="json"), "again") == TABLE


def test_the_table_is_strict():
    data = TABLE.model_dump(mode="json")
    data["hardware"][0]["peak_flops"]["sauce"] = "x"
    with pytest.raises(InputError, match="did you mean 'source'"):
        HardwareTable.parse(data, "t")
    del data["hardware"][0]["peak_flops"]["sauce"], data["hardware"][0]["peak_flops"]["source"]
    with pytest.raises(InputError, match="source is missing"):
        HardwareTable.parse(data, "t")


# -- predicted profiles --------------------------------------------------------------------------------


def predicted(name="dancegrpo-vrt", hardware=PRO, **changes):
    workload = load_workload(name)
    fields = ("latent_frames", "resolution", "chunk_frames", "denoise_steps", "trained_steps", "lora_rank")
    options = {field: getattr(workload, field) for field in (*fields, "lora_targets", "judge_tokens")}
    options |= {"name": "p", "workload": workload.name, "settings": workload.cost_settings()}
    model, judge = find_model(workload.policy), find_judge(workload.judge)
    return predicted_profile(model, judge, hardware, **(options | changes))


@pytest.mark.parametrize("hardware", TABLE.hardware, ids=[h.name for h in TABLE.hardware])
def test_a_predicted_profile_knows_everything_and_says_what_it_is(hardware, tmp_path):
    profile = predicted(hardware=hardware)
    assert (profile.provenance, profile.serving) == ("predicted", "continuous")
    assert "no measurement" in profile.source
    assert tuple(profile.sizes_bytes) == DATA_KINDS
    assert tuple(profile.memory_bytes) == MEMORY_KINDS
    for kind in TASK_KINDS:
        assert profile.duration_us(kind, hardware.name) > 0, kind
    assert tuple(profile.curve_us("score", hardware.name)) == SCORE_BATCHES
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile


def test_sizes_are_those_of_the_shipped_workload():
    assert predicted().sizes_bytes == {
        "embeddings": 4_194_304,
        "latents": 4_193_280,
        "trajectory": 20_966_400,
        "frames": 97_044_480,
        "gradient": 188_743_680,
        "adapter": 188_743_680,
        "reference": 12_579_840,  # means of three trained steps
    }


@pytest.mark.parametrize(
    ("name", "kind", "gigabytes"),
    [
        ("kvpo-vrt", "gradient_buffer", 1.40),  # rank 256 on all linears: 350 M parameters in fp32
        ("kvpo-vrt", "adapter", 1.40),
        ("kvpo-vrt", "optimizer", 2.80),
        ("kvpo-vrt", "kv_cache", 3.45),  # 12 frames
        ("dancegrpo-vrt", "kv_cache", 6.04),  # 21 frames
        ("dancegrpo-vrt", "gradient_buffer", 0.189),  # rank 64 on attention
        ("dancegrpo-vrt", "policy_weights", 2.84),
        ("dancegrpo-vrt", "judge_reserve", 57_344 * (700 + 16 * 510 + 500) / GIGA),
    ],
)
def test_memory_of_the_shipped_workloads(name, kind, gigabytes):
    assert predicted(name).memory_bytes[kind] / GIGA == pytest.approx(gigabytes, rel=0.01)


def test_checkpointing_shrinks_the_activations_of_the_grad_replay_alone():
    plain, again = predicted().memory_bytes, predicted(checkpointing=True).memory_bytes
    assert {kind for kind in MEMORY_KINDS if plain[kind] != again[kind]} == {"grad_replay_activations"}
    assert again["grad_replay_activations"] < plain["grad_replay_activations"] / 10


def test_values_beyond_the_trained_steps_lengthen_every_replay():
    def durations(**changes):
        profile = predicted("kvpo-urflex", **changes)
        return [profile.duration_us(f"{kind}_replay", PRO.name) for kind in ("loss", "old", "ref", "grad")]

    assert all(few < many for few, many in zip(durations(), durations(value_steps=4), strict=True))
    _, old, ref, _ = durations()
    assert ref < old  # the reference is the base without its adapter


def test_checkpointing_lengthens_the_grad_replay_alone():
    plain, again = predicted(), predicted(checkpointing=True)
    slower = {k for k in TASK_KINDS if again.duration_us(k, PRO.name) > plain.duration_us(k, PRO.name)}
    assert slower == {"grad_replay"}


def test_a_narrower_window_shortens_the_rollout():
    assert predicted(window_frames=12).duration_us("generate", PRO.name) < predicted().duration_us("generate", PRO.name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resolution": "480p"}, "resolution='480p' must be HxW in pixels"),
        ({"value_steps": 5}, r"value_steps=5 must be in 1\.\.4"),
        ({"value_steps": 2}, r"trained_steps=3 must be in 1\.\.2"),
        ({"judge_tokens": 0}, "judge_tokens=0 must be at least 1"),
        ({"lora_targets": ("to_x",)}, "lora_targets names 'to_x'"),
        ({"chunk_frames": 4}, "latent_frames=21 must be a multiple of chunk_frames=4"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        predicted(**changes)


def test_a_predicted_profile_plans_a_step():
    """Rewards hidden behind training beat waiting for them; nothing beats the work itself."""
    workload, profile = load_workload("dancegrpo-vrt"), predicted()
    workload.check_profile(profile)
    steps = {}
    for schedule in ("async_reward", "async_reward_merged", "merged_replay"):
        timeline, graph = simulated(workload, placement_of(schedule, 4, 2, scoring="on_arrival"), profile)
        steps[schedule] = timeline.makespan_us
        assert len(timeline.rows) >= len([task for task in graph.tasks if task.kind == "grad_replay"])
    assert steps["merged_replay"] < steps["async_reward_merged"] < steps["async_reward"]
    trained = 12 * profile.duration_us("grad_replay", PRO.name)
    assert steps["merged_replay"] > (12 * profile.duration_us("generate", PRO.name) + trained) // 4


# -- verdicts, token by token ----------------------------------------------------------------------------


def test_without_spread_a_predicted_verdict_takes_what_the_curve_says():
    """One turn: the same reading and writing, so t(b) agrees; two turns share one step curve, within 2 %."""
    for name, tolerance in (("dancegrpo-urflex", 1e-3), ("dancegrpo-vrt", 0.02)):
        profile = predicted(name, sigma=0.0)
        gpu = profile.gpu_kinds[0].name
        for batch in (1, 4, 12):
            names = [str(i) for i in range(batch)]
            turns = {request: turns_of(profile, gpu, request) for request in names}
            steps = Lazy(lambda n, profile=profile, gpu=gpu: profile.duration_us("judge_step", gpu, n))
            took = serve_all_us(TokenService(turns, steps), names)
            assert took == pytest.approx(profile.duration_us("score", gpu, batch), rel=tolerance)


def test_spread_makes_the_last_verdict_late():
    """The mean length grows by exp(sigma^2 / 2); the longest of twelve by far more."""
    even, spread = (predicted(sigma=sigma) for sigma in (0.0, 0.5))
    lengths = [sum(draw_tokens(spread.verdicts, str(i))) for i in range(12)]
    usual = sum(draw_tokens(even.verdicts, "0"))
    assert max(lengths) > 1.5 * usual
    assert spread.verdicts.most_active == even.verdicts.most_active > 12
    assert spread.verdicts.max_tokens == 4 * spread.verdicts.tokens_per_turn


def test_a_spread_that_cannot_be_is_refused():
    with pytest.raises(InputError, match=r"sigma=-0.1 must be in 0..3"):
        predicted(sigma=-0.1)
