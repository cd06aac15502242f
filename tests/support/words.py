"""Options in the oracle's words as the package takes them: what few callers need goes into one record."""

from typing import Any

from vocab_parallel_ce.options import Advanced


def package_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return ``options`` with the fields of ``Advanced`` in an ``advanced``, if there are any."""
    advanced = {name: value for name, value in options.items() if name in Advanced._fields}
    others = {name: value for name, value in options.items() if name not in advanced}
    return {**others, "advanced": Advanced(**advanced)} if advanced else others
