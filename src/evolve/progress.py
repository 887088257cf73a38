"""One progress bar for everything that takes a while."""

import os
import sys


class NoBar:
    """Stands in for a progress bar where nobody watches."""

    def __enter__(self) -> "NoBar":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, _: int) -> None:
        pass

    def close(self) -> None:
        pass

    def set_postfix_str(self, *_: object, **__: object) -> None:
        pass


def progress(steps: int, label: str):
    """A bar in terminals and live notebooks; ``EVOLVE_PROGRESS=0`` switches it off, for stored outputs."""
    ipython = sys.modules.get("IPython")
    live = ipython is not None and hasattr(ipython.get_ipython(), "kernel")
    watched = live or sys.stderr.isatty()
    if os.environ.get("EVOLVE_PROGRESS") == "0" or not watched:
        return NoBar()
    try:
        from tqdm.auto import tqdm
    except ImportError:  # the bar is a comfort, not a need
        return NoBar()
    return tqdm(total=steps, desc=label, leave=False)
