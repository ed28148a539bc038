"""The emulator's library. Other sources make another one. This module does nothing else, so that a
process whose Triton is interpreted can load it too.
"""

import ctypes
import hashlib
import os
import subprocess
from pathlib import Path

from softfocus.backends.cpu.plan import processor

HERE = Path(__file__).parent
HOME = Path(os.environ.get("SOFTFOCUS_EMULATED_CACHE") or "~/.cache/softfocus/emulated-gpu").expanduser()
"""Of all checkouts: what is in it is named after what it was made from, by Triton, too."""
# With -O2 it takes half as long again to compile, and no test takes less
FLAGS = ("-std=c++20", "-O1", "-march=native", "-ffp-contract=off", "-fPIC", "-shared")


def built() -> ctypes.CDLL:
    digest = hashlib.sha256("\0".join((*FLAGS, processor())).encode())
    for path in sorted(path for path in HERE.iterdir() if path.suffix in (".h", ".cpp")):
        text = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(text)}\0".encode() + text)
    HOME.mkdir(parents=True, exist_ok=True)
    library = HOME / f"gpu-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        fresh = library.with_suffix(f".{os.getpid()}")
        subprocess.run(["c++", *FLAGS, HERE / "gpu.cpp", "-o", fresh], check=True)
        fresh.replace(library)
    return ctypes.CDLL(str(library))
