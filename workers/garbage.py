"""Garbage collection in csattn's processes."""

import atexit
import gc


def reduce_gc() -> None:
    """Collect garbage less often for the rest of the process, and not when the interpreter exits.

    With a threshold of 700, collections take a sixth of the time of importing torch. The one at exit, over all that was
    loaded, takes more than a second.
    """
    gc.set_threshold(10_000)
    atexit.unregister(_freeze)  # from an earlier call
    atexit.register(_freeze)


def _freeze() -> None:
    """Exempt all objects from the collection at exit, unless nanobind is loaded, as by Triton from 3.9 on.

    nanobind reports objects that were not collected as leaks, on stderr.
    """
    if not any(kind.__module__ == "nanobind" for kind in type.__subclasses__(type)):
        gc.freeze()
