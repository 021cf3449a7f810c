"""Whose tokens the next step takes."""

from collections.abc import Sequence

from workers.serving.request import Request

# While others decode, questions take at most this share of a step's rows: a long question makes a step longer by so
# much, and no more, however long it is.
QUESTION_SHARE = 0.5


def plan_step(requests: Sequence[Request], max_rows: int) -> list[tuple[Request, int]]:
    """Requests and how many tokens of each: one of every request that decodes, the rest of questions.

    requests: in the order of their admission, at most max_rows. Questions share alike; what one does not need goes to
    the oldest.
    """
    assert len(requests) <= max_rows, f"{len(requests)} requests do not fit into steps of {max_rows} rows"
    decoding = [request for request in requests if not request.question_left]
    asking = [request for request in requests if request.question_left]
    room = max_rows - len(decoding)
    if decoding:
        room = min(room, max(int(max_rows * QUESTION_SHARE), len(asking)))
    shares = share_out(room, [request.question_left for request in asking])
    return [(request, 1) for request in decoding] + [pair for pair in zip(asking, shares, strict=True) if pair[1]]


def share_out(room: int, wants: Sequence[int]) -> list[int]:
    """Equal parts of the room, none larger than what is wanted; what is left over goes to the first."""
    parts = [0] * len(wants)
    hungry = [i for i, want in enumerate(wants) if want]
    while room and hungry:
        equal = max(1, room // len(hungry))
        for i in hungry:
            part = min(equal, wants[i] - parts[i], room)
            parts[i] += part
            room -= part
        hungry = [i for i in hungry if parts[i] < wants[i]]
    return parts
