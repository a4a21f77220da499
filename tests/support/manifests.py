"""Makes the layout fields of a manifest, as attach does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reft.client.attach.rank_table import RankTable, layout_facts
from reft.client.link.rank_group import text_of
from reft.core.layout import symbolic
from reft.core.layout.layout import Leaf, pack
from reft.wire.manifest import table_to


def described(*ranks: Sequence[Leaf]) -> dict[str, Any]:
    """Returns the layout fields of a manifest whose ranks have these leaves."""
    forms = [symbolic.symbolic_form(leaves) for leaves in ranks]
    rank_table = RankTable([layout_facts(pack(leaves), form) for leaves, form in zip(ranks, forms, strict=True)])
    facts = [
        {"table": text_of(table_to(form.table))} if rank_table.describes(i) else {} for i, form in enumerate(forms)
    ]
    tables, layouts, index = rank_table.layouts(facts)
    return {"tables": tables, "layouts": layouts, "layout_of": index}
