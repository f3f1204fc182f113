"""What a catalogue must say, and what its assumptions cost."""

import pytest

from hethub.capacity.catalogue import Assumptions, CatalogueSpec

NODE = {"name": "fast", "accelerator": "H100-SXM5-80GB", "accelerators": 8, "count": 8, "price_per_hour": 40.0}


def test_failures_cost_more_on_more_nodes() -> None:
    assumptions = Assumptions(node_mtbf_hours=1000)
    assert 1 > assumptions.efficiency(1) > assumptions.efficiency(100) > 0


def test_prices_need_a_currency_and_a_date() -> None:
    with pytest.raises(ValueError, match="currency and the date"):
        CatalogueSpec.model_validate({"nodes": [NODE]})


def test_node_types_have_names_of_their_own() -> None:
    with pytest.raises(ValueError, match="two node types are named 'fast'"):
        CatalogueSpec.model_validate({"currency": "EUR", "date": "2026", "nodes": [NODE, NODE]})
