"""The page of the results follows from the stored results alone."""

from __future__ import annotations

from bench import report
from bench.peers import PEERS
from bench.results import RESULTS


def test_the_page_has_every_value_with_its_conditions() -> None:
    results = report.stored()
    page = report.page_of(results)
    assert results
    for measured in results.values():
        assert f"## {measured.section.title}\n" in page
        assert measured.date in page
        assert measured.versions in page.replace("\n", " ")
        for row in measured.section.rows:
            assert f"| {row.name}" in page
    for peer in PEERS:
        assert f"| {peer.name} |" in page


def test_a_page_can_be_made_from_a_part_of_the_results() -> None:
    results = report.stored()
    assert "latency" in results
    page = report.page_of({"latency": results["latency"]})
    assert results["latency"].section.title in page
    assert "performance/throughput.svg" not in page
    assert set(report.plots_of({})) == {"peers"}


def test_every_picture_of_the_page_is_made() -> None:
    page = report.page()
    names = {path.name for path in report.pictures()}
    assert names == {name for name in names if f"(performance/{name})" in page}
    assert names


def test_the_stored_results_are_what_the_bench_would_write() -> None:
    text = report.FILE.read_bytes()
    assert RESULTS.dump_json(RESULTS.validate_json(text), indent=1) + b"\n" == text
