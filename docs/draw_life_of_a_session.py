"""Draw ``life-of-a-session.svg``: run this after a change, and commit what it writes."""

from __future__ import annotations

from pathlib import Path

TARGET = Path(__file__).with_name("life-of-a-session.svg")
WIDTH, HEIGHT = 800, 490
BOX_WIDTH, BOX_HEIGHT = 124, 52

BOXES = {
    "waiting": (150, 110, "for slot and bytes", "#e8eef7"),
    "idle": (430, 110, "hot, no work", "#dff0e3"),
    "busy": (710, 110, "hot, at work", "#dff0e3"),
    "cold": (430, 270, "holds nothing", "#f7ecd9"),
    "ended": (150, 270, "for good", "#eeeeee"),
    "free": (150, 420, "may be lent", "#ffffff"),
    "lent": (337, 420, "to one session", "#ffffff"),
    "emptied": (523, 420, "by the owner thread", "#ffffff"),
    "quarantined": (710, 420, "tried again", "#ffffff"),
}
"""Name -> centre, what it means, colour."""

ARROWS = (
    ("M 14 110 H 86", "open", (48, 100)),
    ("M 212 110 H 366", "slot and bytes lent", (289, 100)),
    ("M 492 98 H 646", "prefill, decode, truncate", (569, 88)),
    ("M 648 122 H 494", "done, refused, cancelled", (569, 141)),
    ("M 430 136 V 242", "evicted, expired", (487, 194)),
    ("M 710 136 V 270 H 494", "failed", (676, 260)),
    ("M 404 244 C 380 190 300 190 214 130", "append at 0", (272, 196)),
    ("M 150 136 V 242", "", (0, 0)),
    ("M 368 270 H 214", "", (0, 0)),
    ("M 212 414 H 273", "", (0, 0)),
    ("M 399 414 H 459", "", (0, 0)),
    ("M 585 414 H 646", "", (0, 0)),
    ("M 523 446 V 466 H 150 V 448", "", (0, 0)),
    ("M 710 394 V 382 H 150 V 392", "", (0, 0)),
)
"""Path, label, where the label stands."""

NOTES = (
    (222, 318, "from every state: the scope is left, released, cancelled,"),
    (222, 334, "superseded by a newer epoch, the runtime ends"),
    (615, 406, "not clean"),
    (430, 378, "clean at last"),
    (337, 481, "clean: lent again"),
)


def draw() -> str:
    """Return the picture."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        "<title>The life of a session, and of a slot</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">',
        '<path d="M0 0 8 4 0 8z" fill="#444"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#fff"/>',
        '<text x="16" y="34" font-size="17" font-weight="bold" fill="#222">a session</text>',
        f'<path d="M16 362H{WIDTH - 16}" stroke="#bbb" stroke-dasharray="4 4"/>',
        '<text x="16" y="424" font-size="17" font-weight="bold" fill="#222">a slot</text>',
    ]
    for path, label, (x, y) in ARROWS:
        parts.append(f'<path d="{path}" fill="none" stroke="#444" stroke-width="1.5" marker-end="url(#tip)"/>')
        if label:
            parts.append(_text(x, y, label, 12.5, "#333"))
    for name, (x, y, meaning, colour) in BOXES.items():
        parts.append(
            f'<rect x="{x - BOX_WIDTH // 2}" y="{y - BOX_HEIGHT // 2}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="8"'
            f' fill="{colour}" stroke="#444" stroke-width="1.5"/>'
        )
        parts += [_text(x, y - 3, name, 15, "#111", "bold"), _text(x, y + 15, meaning, 11.5, "#444")]
    parts += [_text(x, y, note, 11.5, "#555") for x, y, note in NOTES]
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, size: float, colour: str, weight: str = "normal") -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}"'
        f' text-anchor="middle">{text}</text>'
    )


if __name__ == "__main__":
    TARGET.write_text(draw(), encoding="utf-8")
