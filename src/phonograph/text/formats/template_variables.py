"""Variables that a chat template reads."""

from __future__ import annotations

import re

_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
"""Tags of transformers, which the parser does not know and which read no variables."""


def template_variables(template: str) -> frozenset[str] | None:
    """Return the variables that a template reads and does not set first; None if it cannot be parsed.

    Args:
        template: text of the template.
    """
    from jinja2 import TemplateSyntaxError
    from jinja2.ext import loopcontrols
    from jinja2.meta import find_undeclared_variables
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=[loopcontrols])
    try:
        return frozenset(find_undeclared_variables(environment.parse(_GENERATION.sub("", template))))
    except TemplateSyntaxError:
        return None
