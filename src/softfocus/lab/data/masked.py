"""Windows of a text in which some tokens are hidden, to be predicted from both sides: what BERT is
trained on.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from softfocus.lab.data.samples import Inputs
from softfocus.lab.data.tasks import IGNORED


def hide(tokens: NDArray[np.int64], share: float, vocabulary: int, random: np.random.Generator) -> Inputs:
    """A window with a share of its tokens hidden, always as many, so that all windows weigh the
    same.

    Of those 80 % become the mask, 10 % any token, and 10 % stay as they are (Devlin et al. 2018,
    arXiv 1810.04805).

    Args:
        tokens: [L].
        share: of them.
        vocabulary: size of the tokenizer's; the mask is the id after its last.
        random: decides which and how.

    Returns:
        {"input_ids": int64 [L], "labels": int64 [L]}; labels are -100 where nothing is hidden.
    """
    count = max(1, round(share * len(tokens)))
    places = random.choice(len(tokens), count, replace=False)
    labels = np.full_like(tokens, IGNORED)
    labels[places] = tokens[places]
    kind = random.random(count)
    shown = np.where(kind < 0.9, random.integers(vocabulary, size=count), tokens[places])
    seen = tokens.copy()
    seen[places] = np.where(kind < 0.8, vocabulary, shown)
    return {"input_ids": torch.from_numpy(seen), "labels": torch.from_numpy(labels)}
