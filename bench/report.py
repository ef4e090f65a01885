"""Shows results: a table for people, and the generated part of docs/performance.md with plots."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import plots
from bench.peers import BARE_ONE, BARE_TEN, PEERS, SET_UP
from bench.results import (
    BARE,
    RAW,
    RELAY,
    RESULTS,
    Measured,
    Row,
    Section,
    Summary,
    number,
    ratio,
    summarize,
)

ROOT = Path(__file__).parent.parent
FILE = ROOT / "bench" / "results.json"
"""The results that the page shows: each metric's latest that was written."""
PAGE = ROOT / "docs" / "performance.md"
PICTURES = ROOT / "docs" / "performance"


def print_table(section: Section, console: Console) -> None:
    """Print a section for people."""
    table = Table(title=section.title, title_justify="left", caption=section.note or None)
    for heading in _headings(section):
        is_text = heading in {"", "aim"}
        table.add_column(
            heading, justify="left" if is_text else "right", no_wrap=heading not in {"aim", "ratio"}
        )
    for row in section.rows:
        table.add_row(*_cells(section, row))
    console.print(table)


def stored(file: Path = FILE) -> dict[str, Measured]:
    """Return the stored results."""
    return RESULTS.validate_json(file.read_bytes())


def store(measured: Mapping[str, Measured], file: Path = FILE) -> None:
    """Store results in the place of earlier ones of the same metrics."""
    earlier = stored(file) if file.exists() else {}
    file.write_bytes(RESULTS.dump_json({**earlier, **measured}, indent=1) + b"\n")


def page() -> str:
    """Return the generated part of docs/performance.md, from the stored results."""
    return page_of(stored())


def pictures() -> dict[Path, str]:
    """Return each plot of that page by its file."""
    return {PICTURES / f"{name}.svg": text for name, text in plots_of(stored()).items()}


def page_of(results: Mapping[str, Measured]) -> str:
    """Return Markdown with a table for each metric."""
    return "\n".join(_page(results))


def plots_of(results: Mapping[str, Measured]) -> dict[str, str]:
    """Return SVG by name, of what was measured."""
    return {
        name: draw
        for name, draw in {
            "throughput": _throughput(results),
            "latency": _latency(results),
            "growth": _growth(results),
            "peers": _peers(results),
        }.items()
        if draw is not None
    }


def _page(results: Mapping[str, Measured]) -> Iterator[str]:
    drawn = plots_of(results)
    before = {"latency": "latency", "burst": "throughput", "documents": "growth"}
    for metric, measured in results.items():
        section = measured.section
        yield f"## {section.title}\n"
        if (picture := before.get(metric)) in drawn:
            yield f"![{_alternatives()[picture]}](performance/{picture}.svg)\n"
        headings = _headings(section)
        yield f"| {' | '.join(headings)} |"
        yield f"| --- |{' ---: |' * (len(headings) - 1)}"
        for row in section.rows:
            yield f"| {' | '.join(_cells(section, row))} |"
        yield ""
        if section.note:
            yield f"{_wrapped(section.note)}\n"
        rounds = "1 round" if measured.rounds == 1 else f"{measured.rounds} rounds"
        made = f"{measured.date}, {rounds}, {measured.machine}; {measured.versions}."
        yield f"{_wrapped(made)}\n"
    yield "## Other systems\n"
    yield f"![{_alternatives()['peers']}](performance/peers.svg)\n"
    yield (
        "| | 1 endpoint, /s | CPU, ms | 10 endpoints, /s | CPU, ms | one event p50, p99, ms "
        "| peak memory, MB |"
    )
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for peer in PEERS:
        ten = (f"{peer.ten[0]:,.0f}", f"{peer.ten[1]:g}") if peer.ten else ("–", "–")
        times = ", ".join(f"{value:g}" for value in peer.latency) if peer.latency else "–"
        yield (
            f"| {peer.name} | {peer.one[0]:,.0f} | {peer.one[1]:g} | {ten[0]} | {ten[1]} | {times} "
            f"| {peer.memory or '–'} |"
        )
    yield f"\n{_wrapped(SET_UP)}\n"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _alternatives() -> dict[str | None, str]:
    return {
        "latency": "Times of single events, as a cumulative distribution",
        "throughput": "Deliveries a second of relay, bare outbox and raw limit",
        "growth": "CPU time for each change by the number of events in the document",
        "peers": "Deliveries a second of other systems, as a share of a bare outbox",
    }


def _headings(section: Section) -> list[str]:
    headings = ["", *section.columns]
    if section.ratio is not None:
        headings.append(f"{section.ratio[0]} / {section.ratio[1]}")
    return [*headings, "aim"] if any(row.aim for row in section.rows) else headings


def _cells(section: Section, row: Row) -> list[str]:
    values = [summarize(row.values.get(column, ())) for column in section.columns]
    cells = [f"{row.name}, {row.unit}".removesuffix(", ")]
    cells += ["–" if value is None else str(value) for value in values]
    if section.ratio is not None:
        quotient = ratio(row, section.ratio)
        cells.append("–" if quotient is None else number(quotient.median))
    return [*cells, row.aim] if any(row.aim for row in section.rows) else cells


def _throughput(results: Mapping[str, Measured]) -> str | None:
    groups: dict[str, dict[str, plots.Bar]] = {}
    for metric in ("burst", "publish"):
        for row in results[metric].section.rows if metric in results else ():
            if row.name.endswith(", deliveries"):
                groups[row.name.removesuffix(", deliveries")] = _row_bars(row)
    return plots.bars("Deliveries a second", "/s", groups) if groups else None


def _row_bars(row: Row) -> dict[str, plots.Bar]:
    bars = {}
    for column in (RELAY, BARE, RAW):
        summary = summarize(row.values.get(column, ()))
        if summary is not None:
            bars[column] = plots.Bar(summary.median, summary.low, summary.high)
    return bars


def _latency(results: Mapping[str, Measured]) -> str | None:
    if "latency" not in results:
        return None
    series = {
        name: [(value, 100 * (index + 1) / len(values)) for index, value in enumerate(values)]
        for name, values in results["latency"].section.series.items()
    }
    return plots.lines("One event, told to received", "ms", "% received by then", series)


def _growth(results: Mapping[str, Measured]) -> str | None:
    if "documents" not in results:
        return None
    section = results["documents"].section
    series = {}
    for row in section.rows:
        if row.unit == "ms":
            points = []
            for column in section.columns:
                summary = summarize(row.values.get(column, ()))
                if summary is not None:
                    points.append((float(column.split()[0].replace(",", "")), summary.median))
            series[row.name] = points
    return plots.lines(
        "A change, by the size of the document",
        "events in the document",
        "ms",
        series,
        logarithmic=True,
    )


def _peers(results: Mapping[str, Measured]) -> str:
    groups = {"imds-relay (this run)": _shares_of_relay(results)} if "burst" in results else {}
    for peer in PEERS:
        shares = {"1 endpoint": summarize([peer.one[0] / BARE_ONE])}
        if peer.ten is not None:
            shares["10 endpoints"] = summarize([peer.ten[0] / BARE_TEN])
        groups[peer.name] = _percent_bars(shares)
    return plots.bars("Deliveries a second, as a share of a bare outbox", "%", groups)


def _shares_of_relay(results: Mapping[str, Measured]) -> dict[str, plots.Bar]:
    rows = [row for row in results["burst"].section.rows if row.name.endswith(", deliveries")]
    shares = (ratio(row, (RELAY, BARE)) for row in rows)
    return _percent_bars(dict(zip(("1 endpoint", "10 endpoints"), shares, strict=True)))


def _percent_bars(shares: Mapping[str, Summary | None]) -> dict[str, plots.Bar]:
    return {
        name: plots.Bar(100 * share.median, 100 * share.low, 100 * share.high)
        for name, share in shares.items()
        if share is not None
    }
