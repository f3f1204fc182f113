"""The answers of `hethub size` on the terminal: options, their frontier, and what to add next."""

from collections.abc import Sequence

from rich.table import Table

from hethub.predictor.capacity import Addition, Assumptions, CatalogueSpec, Option
from hethub.runtime.console import make_console

MOST_OPTIONS, BAR = 20, 40


def print_options(options: Sequence[Option], catalogue: CatalogueSpec, assumptions: Assumptions) -> None:
    """The options that meet what was asked first, and a plot of the frontier of time and price (or size)."""
    console = make_console()
    if not options:
        console.print("no cluster of this catalogue holds the model; add nodes with more memory, or more of them")
        return
    table = Table(
        "nodes",
        "accelerators",
        "tokens/s",
        "goodput",
        "days",
        f"cost {catalogue.currency or ''}",
        "MWh",
        "meets",
        "frontier",
    )
    for option in options[:MOST_OPTIONS]:
        table.add_row(
            _nodes(option), str(option.accelerators), f"{option.tokens_per_second:,.0f}", f"{option.goodput_tokens_per_second:,.0f}",
            f"{option.days:.1f}", "" if option.cost is None else f"{option.cost:,.0f}",
            "" if option.energy_kwh is None else f"{option.energy_kwh / 1e3:.1f}", "yes" if option.meets else "no",
            "*" if option.on_frontier else "",
        )  # fmt: skip
    console.print(table)
    frontier = sorted((option for option in options if option.on_frontier), key=lambda option: option.days)
    slowest = max(option.days for option in frontier)
    for option in frontier:
        console.print(
            f"{_nodes(option):28}{'█' * max(1, round(BAR * option.days / slowest))} {option.days:.1f} days",
            markup=False,
        )
    if catalogue.date:
        console.print(f"prices of {catalogue.date}; nodes owned cost nothing")
    stated = ", ".join(f"{key} {value:g}" for key, value in assumptions.to_dict().items())
    console.print(f"assumed, not measured: {stated}")


def print_additions(additions: Sequence[Addition], catalogue: CatalogueSpec) -> None:
    """Node types, best gain per price first."""
    table = Table("add one", "tokens/s then", "gained", f"gained per {catalogue.currency or 'price'} and hour")
    for addition in additions:
        per_price = "" if addition.gained_per_price is None else f"{addition.gained_per_price:,.1f}"
        table.add_row(
            addition.node, f"{addition.tokens_per_second:,.0f}", f"{addition.gained_tokens_per_second:,.0f}", per_price
        )
    make_console().print(table)


def _nodes(option: Option) -> str:
    return " + ".join(f"{count} {name}" for name, count in option.nodes.items()) or "what is owned"
