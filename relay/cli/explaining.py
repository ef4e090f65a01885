"""``explain``: what a sink does with an event, and when it would be tried again."""

from __future__ import annotations

from typing import Any, Final

from relay.cli._http import Client, talking
from relay.cli._screen import counted, facts, local, show, show_json, show_table, spoken
from relay.cli.events import AsJson, EventId
from relay.cli.sending import SinkName

_MEANT: Final = {
    "transient": "if it cannot be reached, does not answer, or answers 408, 409, 425, 429 or 5xx",
    "slow": "if it answers that somebody must mend something, as with other 4xx",
}


@talking
async def explain(relay: Client, event: EventId, sink: SinkName, *, as_json: AsJson = False) -> None:
    """Say whether a sink wants an event, and when it would be tried again if each try failed at once, from now on.

    Jitter, which only adds up to a tenth, is left out.
    """
    found = await relay.get("sinks", sink, "plan", event=event)
    if as_json:
        show_json(found)
        return
    waits = f"{counted(found['attempts'], 'try')} so far" if found["waiting"] else "nothing waits"
    show(
        facts(
            [
                ("event", found["eventId"]),
                ("last said", found["type"]),
                ("not before", local(found["notBefore"])),
                ("sink", found["sink"]),
                ("wanted", "yes" if found["whyNot"] is None else f"no: {found['whyNot']}"),
                ("delivery", waits),
            ]
        )
    )
    for course in found["plan"]:
        show("", f"{_MEANT[course['failure']]}:")
        show_table(("tries", "every", "from", "to"), [_line(one) for one in course["tries"]], empty="no other try")
        show(f"then a dead letter: {course['ends']}" if course["ends"] else "and so on")


def _line(one: dict[str, Any]) -> tuple[object, ...]:
    return one["tries"], spoken(one["pauseSeconds"]), local(one["first"]), local(one["last"], relative=False)
