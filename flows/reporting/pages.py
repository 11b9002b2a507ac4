"""Self-contained HTML pages from the templates in this folder."""

from jinja2 import Environment, PackageLoader, select_autoescape

_TEMPLATES = Environment(
    loader=PackageLoader("ostinato.flows.reporting"), autoescape=select_autoescape()
)


def render(name: str, **values: object) -> str:
    """The page of the template `name`.html with these values."""
    return _TEMPLATES.get_template(f"{name}.html").render(values)
