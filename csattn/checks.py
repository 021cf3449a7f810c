"""Checks of incoming values: each `require_` raises ConfigError with a sentence for the user."""

from numbers import Integral, Real
from pathlib import Path

from csattn.cpus import available_cpus
from csattn.errors import ConfigError

MAX_THREADS = 4096  # more are a mistake on any machine


def require_one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        names = ", ".join(str(one) for one in allowed if one is not None)
        raise ConfigError(f"{name} must be one of {names}, got {value!r}")


def require_at_least(name: str, value: object, lowest: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    if value < lowest:
        raise ConfigError(f"{name} must be at least {lowest}, got {value}")


def require_num_threads(name: str, value: int) -> None:
    require_at_least(name, value, 1)
    if value > MAX_THREADS:
        raise ConfigError(
            f"{name} must be at most {MAX_THREADS}, got {value}; one for each CPU is enough, and there are "
            f"{available_cpus()}"
        )


def require_share(name: str, value: float) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    if not 0.0 < value <= 1.0:
        raise ConfigError(f"{name} must be more than 0 and at most 1, got {value}")


def require_text(name: str, value: object, otherwise: str = "") -> None:
    """Raise ConfigError unless the value is a str that has UTF-8 bytes and is not blank.

    otherwise: ends the message, with what else may be given.
    """
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be text, got a value of type {type(value).__name__}; give a str")
    if (half := lone_surrogate(value)) is not None:
        raise ConfigError(
            f"{name} is not UTF-8 text (character {half}): it has half a surrogate pair; read it as UTF-8, or leave "
            "that character out"
        )
    if not value.strip():
        raise ConfigError(f"{name} holds no text; give one that is not empty{otherwise}")


def lone_surrogate(text: str) -> int | None:
    """Return where the text has half a surrogate pair, which cannot be encoded as UTF-8; None if nowhere."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def require_model_name(value: object) -> None:
    """Raise ConfigError for what is no name. A blank one is an unset shell variable; the demo model is None."""
    if value is not None and (not isinstance(value, str | Path) or not str(value).strip()):
        raise ConfigError(
            f"a model is a directory, a .gguf file or a hub id, got {value!r}; give one, or leave it out for the demo "
            "model"
        )
