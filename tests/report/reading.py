"""A page read as a reader would, and the same figures computed from the rows by other means than the program's."""

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "img", "br", "link", "input", "hr"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    text: str = ""
    around: dict[str, str] = field(default_factory=dict)  # the data- attributes of all that encloses it


class Page(HTMLParser):
    """All elements in order, each with its text and what encloses it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.unbalanced: list[str] = []
        self.feed(text)
        self.unbalanced += [element.tag for element in self._open]

    def handle_starttag(self, tag, attrs):
        around = {}
        for outer in self._open:
            around |= {name: value for name, value in outer.attributes.items() if name.startswith("data-")}
        element = Element(tag, {name: value or "" for name, value in attrs}, around=around)
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag):
        if not self._open or self._open[-1].tag != tag:
            self.unbalanced.append(tag)
            return
        self._open.pop()

    def handle_data(self, data):
        for element in self._open:
            element.text += data

    def with_key(self, key: str) -> list[Element]:
        return [element for element in self.elements if element.attributes.get("data-key") == key]

    def value(self, key: str) -> float:
        values = {element.attributes["data-value"] for element in self.with_key(key)}
        assert len(values) == 1, (key, values)
        return float(values.pop())

    def missing(self) -> set[str]:
        return {element.attributes["data-missing"] for element in self.elements if "data-missing" in element.attributes}


def table(path: Path) -> list[dict[str, str]]:
    """A TSV file without the program's reader."""
    names, *lines = [line.split("\t") for line in path.read_text().splitlines()]
    return [dict(zip(names, line, strict=True)) for line in lines]


def wrong_numbers(page: Page, run: Path, certificates: str) -> list[str]:
    """The numbers of a page of one run that do not follow from the rows of `run`; every kind must be on the page."""
    rows = table(run / certificates)
    wrong, seen = [], set()

    def compare(element: Element, expected: float, digits: int) -> None:
        key = element.attributes["data-key"]
        seen.add(key)
        shown = re.search(r"[-+]?\d+(\.\d+)?", element.text.replace("−", "-"))
        scale = 100 if "certified_at" in key or "accuracy" in key else 1
        close = abs(float(element.attributes["data-value"]) - expected) < 1e-9 * max(1, abs(expected))
        if not close or shown is None or abs(float(shown[0]) - scale * expected) > 0.5001 * 10**-digits:
            wrong.append(f"{key}: {element.text!r}, {element.attributes['data-value']}, rows say {expected}")

    def certified(at: str, of: list[dict[str, str]]) -> float:
        return sum(row["correct"] == "1" and float(row["radius"]) >= float(at) for row in of) / len(of)

    acr = sum(float(row["radius"]) * int(row["correct"]) for row in rows) / len(rows)
    silent = sum(row["predict"] == "-1" for row in rows)
    for key, expected, digits in (
        ("acr", acr, 3), ("card_acr", acr, 3), ("abstained", silent, 0), ("card_abstained", silent, 0),
        ("card_certified_at_0.25", certified("0.25", rows), 1),
    ):  # fmt: skip
        for element in page.with_key(key):
            compare(element, expected, digits)
    for element in page.with_key("certified_at"):
        compare(element, certified(element.attributes["data-radius"], rows), 1)
    for element in (e for e in page.elements if e.attributes.get("data-key", "").startswith("class_")):
        own = [row for row in rows if row["label"] == element.around["data-class"]]
        expected = {
            "class_images": len(own),
            "class_wrong": sum(row["correct"] == "0" and row["predict"] != "-1" for row in own),
            "class_abstained": sum(row["predict"] == "-1" for row in own),
        }
        if element.attributes["data-key"] == "class_certified_at":
            compare(element, certified(element.attributes["data-radius"], own), 1)
        else:
            compare(element, expected[element.attributes["data-key"]], 0)
    attacks = {(r["attack"], r["target"], float(r["strength"])): float(r["accuracy"]) for r in table(run / "attacks.tsv")}
    for element in page.with_key("attack_accuracy"):
        where = element.around
        compare(element, attacks[where["data-attack"], where["data-target"], float(where["data-strength"])], 1)
    missing = {"acr", "card_acr", "abstained", "certified_at", "class_certified_at", "class_images", "attack_accuracy"} - seen
    return wrong + [f"{key}: nowhere" for key in sorted(missing)]
