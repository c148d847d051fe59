"""The page: data and pictures in the template, script and style within it, nothing fetched."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from figures import side
from figures.webpage import data, images, tokens
from figures.webpage.data import Shelf

ASSETS = Path(__file__).with_name("assets")


def render(shelves: Sequence[Shelf]) -> str:
    """The whole page of some models. The same records give the same bytes."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FileSystemLoader(ASSETS),
    )
    script, style = (_asset(name) for name in ("view.js", "style.css"))
    return environment.get_template("page.html").render(
        models=[_model(shelf) for shelf in shelves],
        together=images.side_by_side(shelves),
        script=Markup(script),  # noqa: S704 (our own files)
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup(style),  # noqa: S704
        code=_code,
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _model(shelf: Shelf) -> dict[str, Any]:
    views, said = _views(shelf)
    heads = [one for one in shelf.drawable.values() if one.study == "heads"]
    return {
        "name": shelf.model,
        "planted": shelf.planted,
        "facts": data.facts(shelf),
        "entries": data.summary(shelf),
        "view": embedded(views) if views else "",
        "unseen": said,
        "attention": [table for record in heads for table in tokens.attention(record)],
        "pictures": images.of_model(shelf),
    }


def _views(shelf: Shelf) -> tuple[list[dict[str, Any]], list[str]]:
    """What the token view shows, by record, and a sentence for each record that it cannot show."""
    views: list[dict[str, Any]] = []
    held = {**shelf.records, **shelf.faults}
    shown = [name for study in tokens.STUDIES for name in held if name.split("/")[1] == study]
    said = [f"{name} is not shown: {shelf.undrawn[name].rstrip('.')}." for name in shown if name in shelf.undrawn]
    for name, record in ((name, shelf.drawable[name]) for name in shown if name not in shelf.undrawn):
        found, why = side.attempt(lambda record=record: tokens.view(record), again=f"make probe-{record.study}")
        if why:
            said.append(f"{name} is not shown: {why}.")
        elif found is None:
            said.append(f"{name} has no pair that passes the competence gate, so no token has an effect to show.")
        else:
            views.append({"name": name, **found})
    return views, said


def embedded(value: Any) -> Markup:
    """JSON that can stand within a script element: nothing in it can end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 (escaped above)


def _code(text: str) -> Markup:
    """A sentence with its `code` marked up, all of it escaped."""
    forms = (Markup("{}"), Markup("<code>{}</code>"))
    return Markup("").join(forms[at % 2].format(part) for at, part in enumerate(text.split("`")))
