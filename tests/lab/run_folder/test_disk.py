"""Sizes as people read them."""

import pytest

from softfocus.lab.run_folder.disk import size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (999_600, "1.0 MB"),
        (99_960, "100 KB"),
        (12_340, "12.3 KB"),
        (836_400_000, "836 MB"),
        (49_000_000, "49.0 MB"),
        (1_500_000_000, "1.5 GB"),
        (1_234_567_000_000, "1,235 GB"),
    ],
)
def test_no_size_is_rounded_to_nothing(size: int, text: str) -> None:
    assert size_text(size) == text
