"""HTML from the templates beside this file; what is not marked as HTML is escaped."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

_ENVIRONMENT = Environment(
    loader=PackageLoader("selectconv.lab.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(template: str, **values: Any) -> Markup:
    """Fill a file of `templates/`.

    Example:
        >>> "a &lt; b" in render("slots.html", layers=["a < b"])
        False
    """
    return Markup(_ENVIRONMENT.get_template(template).render(values))
