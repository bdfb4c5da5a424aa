"""Differences of logits: bounded in each test, and reported at the end by peer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest

from oracle.comparison import TOLERANCE

DIFFERENCE = "largest difference of logits"


@pytest.fixture
def hold(record_property: Callable[[str, object], None]) -> Callable[[str, float], None]:
    """Hold a difference to the tolerance and remember it under the name of a peer."""

    def holds(peer: str, difference: float) -> None:
        record_property(DIFFERENCE, [peer, difference])
        assert difference <= TOLERANCE, f"logits differ from {peer}'s by {difference:.3g}"

    return holds


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line a peer."""
    found: dict[str, list[float]] = defaultdict(list)
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in (
                getattr(report, "user_properties", ()) if getattr(report, "when", "") == "call" else ()
            ):
                if name == DIFFERENCE:
                    found[value[0]].append(value[1])
    for peer, values in sorted(found.items()):
        terminalreporter.write_line(
            f"{DIFFERENCE} from {peer}: {max(values):.2g} over {len(values)} comparisons"
        )
