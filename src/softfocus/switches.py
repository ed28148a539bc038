"""What the environment switches on or off."""

import os


def switched_on(name: str, default: bool, *others: str) -> bool:
    """Whether an environment variable says on; ``default`` where it is not set. ``others`` are the
    values that the caller reads itself, for the error.

    Raises:
        ValueError: it says neither on nor off.
    """
    setting = os.environ.get(name, "").lower()
    if setting in ("on", "1", "true", "yes"):
        return True
    if setting in ("off", "0", "false", "no"):
        return False
    if setting:
        *most, last = "on", "off", *others
        raise ValueError(f"{name}={setting} is neither {', '.join(most)} nor {last}; set it to one, or unset it")
    return default
