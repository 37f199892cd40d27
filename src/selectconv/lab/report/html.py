"""HTML from the templates beside this file; what is not marked as HTML is escaped."""

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("selectconv.lab.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def render(template: str, **values: Any) -> Markup:
    """Fill a file of `templates/`.

    Example:
        >>> render("lines.html", lines=["a < b"])
        Markup('<ul class="problems"><li>a &lt; b</li></ul>')
    """
    return Markup(_environment().get_template(template).render(values))
