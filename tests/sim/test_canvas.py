"""Widths of figures and what goes with them. Writing is tested in test_plot.py."""

import pytest
from matplotlib.figure import Figure

from stagebreaker.sim.canvas import COLUMN_IN, PAGE_IN, SCREEN_IN, figure_of, size_of, text_us


def test_the_whole_figure_of_axes_in_a_part_of_it():
    figure = Figure()
    assert figure_of(figure.add_subplot()) is figure
    assert figure_of(figure.subfigures(1, 2)[1].add_subplot()) is figure


def test_narrower_figures_have_smaller_print_and_shorter_notes():
    screen, page, column = (size_of(Figure(figsize=(width, 1))) for width in (SCREEN_IN, PAGE_IN, COLUMN_IN))
    assert screen.axis_font > page.axis_font > column.axis_font >= 6
    assert screen.right_in > page.right_in > column.right_in
    assert (screen.causes, page.causes, column.causes) == (True, True, False)


@pytest.mark.parametrize(
    ("duration_us", "text"),
    [(0, "0 us"), (1999, "1999 us"), (2000, "2.0 ms"), (1_999_960, "2000.0 ms"), (2_000_000, "2.0 s")],
)
def test_durations_in_their_unit(duration_us, text):
    assert text_us(duration_us) == text
