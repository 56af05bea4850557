"""An error whose traceback holds nothing: memory of a load that failed is free at once."""

from __future__ import annotations

import traceback

__all__ = ["let_go"]


def let_go(error: BaseException, before: BaseException | None = None) -> None:
    """Empty the frames that an error, its causes and their contexts came through.

    Whoever keeps the error (a notebook, a retry loop) would else keep every tensor that stood in
    one of them. Frames that still run keep what they have.

    Args:
        error: what a load ends with.
        before: what was being handled when the load began (``sys.exception()``): not the load's.
    """
    todo: list[BaseException | None] = [error]
    seen: set[int] = {id(before)}
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        todo += [each.__cause__, each.__context__]
