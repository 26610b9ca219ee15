"""Batch curves between measured points, and the refusal to guess beyond them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.interpolate import interpolate_us

POINTS = st.dictionaries(st.integers(1, 64), st.integers(0, 10**9), min_size=1, max_size=6)


@given(POINTS)
def test_measured_points_are_returned_as_they_are(points_us):
    for size, us in points_us.items():
        assert interpolate_us(points_us, size, "score") == us


@given(POINTS, st.integers(1, 64))
def test_between_two_points_lies_between_their_values(points_us, size):
    low = max((b for b in points_us if b <= size), default=None)
    high = min((b for b in points_us if b >= size), default=None)
    if low is None or high is None:
        with pytest.raises(InputError):
            interpolate_us(points_us, size, "score")
    else:
        ends = sorted((points_us[low], points_us[high]))
        assert ends[0] <= interpolate_us(points_us, size, "score") <= ends[1]


@given(st.integers(0, 10**7), st.integers(0, 10**6), st.integers(1, 32), st.integers(33, 64), st.integers(1, 64))
def test_an_affine_curve_is_exact(t0_us, t1_us, low, high, size):
    points_us = {b: t0_us + b * t1_us for b in (high, low)}
    if low <= size <= high:
        assert interpolate_us(points_us, size, "score") == t0_us + size * t1_us
    else:
        assert interpolate_us(points_us, size, "score", extrapolate=True) == t0_us + size * t1_us


def test_the_table_is_used_and_not_an_inverse_law():
    assert [interpolate_us({1: 100, 2: 60, 4: 45}, b, "x") for b in (1, 2, 3, 4)] == [100, 60, 52, 45]


@pytest.mark.parametrize("size", [1, 9, 0, -3])
def test_outside_the_measured_range_is_refused(size):
    with pytest.raises(
        InputError,
        match=rf"batch size {size} of score is outside the measured 2\.\.8; profile that batch size",
    ):
        interpolate_us({2: 10, 8: 40}, size, "score")


def test_one_point_cannot_be_continued():
    with pytest.raises(InputError, match=r"outside the measured 4\.\.4"):
        interpolate_us({4: 10}, 5, "score", extrapolate=True)


def test_a_falling_curve_is_not_continued_below_zero():
    assert interpolate_us({1: 100, 2: 10}, 9, "score", extrapolate=True) == 0
