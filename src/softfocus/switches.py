"""What the environment switches on or off."""

import os


def switched_on(name: str, default: bool) -> bool:
    """Whether an environment variable says on; ``default`` where it is not set.

    Raises:
        ValueError: it says neither on nor off.
    """
    setting = os.environ.get(name, "").lower()
    if setting in ("on", "1", "true", "yes"):
        return True
    if setting in ("off", "0", "false", "no"):
        return False
    if setting:
        raise ValueError(f"{name}={setting} is neither on nor off; set it to one of them, or unset it")
    return default
