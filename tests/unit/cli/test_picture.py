"""Pictures: each point is where its values are, on logarithmic axes."""

import math
from xml.etree import ElementTree

import pytest

from baton.cli.picture import Series, chart

SVG = "{http://www.w3.org/2000/svg}"


def circles(picture: str) -> list[tuple[float, float]]:
    """Centres of the points; the last one of each series is of the legend."""
    root = ElementTree.fromstring(picture)
    return [(float(each.attrib["cx"]), float(each.attrib["cy"])) for each in root.iter(f"{SVG}circle")]


def test_equal_factors_are_equal_distances() -> None:
    one, two, three, _ = circles(chart("t", "x", "y", [Series("a", [(1, 1000), (10, 100), (100, 10)], line=True)]))
    assert two[0] - one[0] == pytest.approx(three[0] - two[0], abs=0.2)
    assert two[1] - one[1] == pytest.approx(three[1] - two[1], abs=0.2)
    assert one[0] < two[0]
    assert one[1] < two[1], "larger values of y are higher up"


def test_the_diagonal_goes_through_points_that_are_equal() -> None:
    picture = chart("t", "x", "y", [Series("a", [(3, 3), (40, 80)])], band=0.15)
    x, y = circles(picture)[0]
    lines = [
        [float(each.attrib[name]) for name in ("x1", "y1", "x2", "y2")]
        for each in ElementTree.fromstring(picture).iter(f"{SVG}line")
        if each.attrib["stroke"] == "#888888"
    ]
    assert len(lines) == 3
    x1, y1, x2, y2 = lines[0]
    assert y == pytest.approx(y1 + (x - x1) / (x2 - x1) * (y2 - y1), abs=0.3)
    # On the other lines, y is 1.15 and 0.85 times x.
    shifts = [(line[1] - y1) - (line[0] - x1) * (y2 - y1) / (x2 - x1) for line in lines[1:]]
    assert shifts[0] / shifts[1] == pytest.approx(math.log(1.15) / math.log(0.85), rel=0.05)


def test_texts_are_escaped_and_all_labels_are_there() -> None:
    picture = chart("a < b", "x & y", "y", [Series("s", [(1, 1), (1, 1)], ["<1>", "<2>"])])
    texts = [each.text for each in ElementTree.fromstring(picture).iter(f"{SVG}text")]
    assert {"a < b", "x & y", "<1>", "<2>", "s"} <= set(texts)


def test_no_points_are_refused() -> None:
    with pytest.raises(ValueError, match="no points"):
        chart("t", "x", "y", [Series("a", [])])
