"""How a process of ours looks for garbage."""

import atexit
import gc


def spare_garbage() -> None:
    """Look less for garbage from now on, and not once more when the process ends.

    With a threshold of 700, looking takes a sixth of the seconds in which torch is imported, and at the end, in all
    that was loaded, more than a second. Both hold for as long as the process lives.
    """
    gc.set_threshold(10_000)
    atexit.unregister(_freeze)  # of a call before
    atexit.register(_freeze)


def _freeze() -> None:
    """Not beside classes of nanobind, as Triton has from 3.9 on: it calls what is not looked for leaks, on stderr."""
    if not any(kind.__module__ == "nanobind" for kind in type.__subclasses__(type)):
        gc.freeze()
