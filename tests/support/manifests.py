"""Makes the layout fields of a manifest, as attach does."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from reft.client.attach.rank_table import LayoutFacts, RankTable
from reft.core.layout import symbolic
from reft.core.layout.layout import Leaf, pack
from reft.wire.manifest import table_to


def described(*ranks: Sequence[Leaf]) -> dict[str, Any]:
    """Returns the layout fields of a manifest whose ranks have these leaves."""
    forms = [symbolic.symbolic_form(leaves) for leaves in ranks]
    facts = [LayoutFacts.of(pack(leaves), form) for leaves, form in zip(ranks, forms, strict=True)]
    rank_table = RankTable([SimpleNamespace(layout=each) for each in facts])
    published = [table_to(form.table) if rank_table.describes(i) else b"" for i, form in enumerate(forms)]
    tables, layouts, index = rank_table.layouts(published)
    return {"packed_tables": tables, "layouts": layouts, "layout_of": index}
