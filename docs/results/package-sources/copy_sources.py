"""Copy the Python sources of the installed packages into a folder, as a text to train on.

python docs/results/package-sources/copy_sources.py FOLDER

Takes the packages of the environment that runs it, `make setup`'s say, without softfocus itself.
Files over 400 kB, which are mostly tables, are left out. Prints what each package gives.
"""

import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

LARGEST = 400_000  # bytes


def main(folder: Path) -> None:
    """Copy the files, and print the packages, the largest first."""
    found = {}
    for package in metadata.distributions():
        name = package.metadata["Name"]
        if name == "softfocus":
            continue
        bytes_ = count = 0
        for file in package.files or ():
            source = Path(str(package.locate_file(file)))
            if file.suffix != ".py" or ".." in file.parts or not source.is_file() or source.stat().st_size > LARGEST:
                continue
            copy = folder / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
            os.utime(copy, (0, 0))  # the key of a text in the token cache has the times of its files
            bytes_ += source.stat().st_size
            count += 1
        if count:
            found[f"{name} {package.version}"] = bytes_, count
    for name, (bytes_, count) in sorted(found.items(), key=lambda item: -item[1][0]):
        print(f"{bytes_:>10} {count:>6} {name}")
    print(f"{sum(b for b, _ in found.values()):>10} {sum(c for _, c in found.values()):>6} in total")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
