"""The emulator's library. It is compiled anew where its sources are newer. This module does nothing
else, so that a process whose Triton is interpreted can load it too.
"""

import ctypes
import os
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
HOME = Path(os.environ.get("SOFTFOCUS_EMULATED_CACHE", HERE.parents[2] / ".emulated" / "gpu"))


def built() -> ctypes.CDLL:
    HOME.mkdir(parents=True, exist_ok=True)
    library = HOME / "gpu.so"
    newest = max(path.stat().st_mtime for path in HERE.iterdir() if path.suffix in (".h", ".cpp"))
    if not library.exists() or library.stat().st_mtime < newest:
        fresh = library.with_suffix(f".{os.getpid()}")
        # With -O2 it takes half as long again to compile, and no test takes less
        flags = ["-std=c++20", "-O1", "-march=native", "-ffp-contract=off", "-fPIC", "-shared"]
        subprocess.run(["c++", *flags, HERE / "gpu.cpp", "-o", fresh], check=True)
        fresh.replace(library)
    return ctypes.CDLL(str(library))
