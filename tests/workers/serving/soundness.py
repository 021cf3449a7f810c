"""`check` raises AssertionError if the service's bookkeeping is inconsistent."""

from functools import singledispatch
from typing import Any

from workers.serving.residency import Residency
from workers.serving.scheduler import Scheduler


@singledispatch
def check(thing: Any) -> None:
    raise TypeError(f"nothing is known of what keeps {thing!r} right")


@check.register
def _(scheduler: Scheduler) -> None:
    """Raise AssertionError if a slot is lost, or a request is in two places."""
    request_slots = sorted([*scheduler._running, *scheduler._free_request_slots])
    assert request_slots == list(range(scheduler._engine.max_requests)), f"{scheduler!r} lost or shared a slot"
    assert all(request.request_slot == request_slot for request_slot, request in scheduler._running.items()), (
        "a request has another slot"
    )
    assert len(scheduler._running) <= scheduler.max_running, f"{scheduler!r} runs too many"
    known = [*scheduler._queue, *scheduler._running.values()]
    assert len(set(map(id, known))) == len(known), "a request is in two places"
    assert not any(request.is_over for request in known), "a request that is over is still here"
    assert scheduler.flow.num_in_flight >= len(known), f"{scheduler!r} has requests without a place"


@check.register
def _(residency: Residency) -> None:
    """Raise AssertionError if more is held than the budget allows, contexts share an id, or users are miscounted."""
    budget = residency._settings.context_bytes
    assert budget is None or residency.held_bytes <= budget, f"{residency!r} exceeds its budget of {budget:,} bytes"
    numbers = [resident.context_id for resident in residency._residents.values()]
    assert len(set(numbers)) == len(numbers), f"{residency!r} has two contexts of one number"
    assert all(resident.num_users >= 0 for resident in residency._residents.values()), f"{residency!r} lost a user"
    known = residency._residents.keys() | residency._loading.keys()
    assert residency._forgotten <= known, f"{residency!r} would unload what is not there"
