"""Numbers and pictures made of rows of attention weights."""

import torch
from torch import Tensor

MEASURES = (
    "zeros", "above_1e_9", "above_1e_3", "below_1e_3", "below_1e_7", "entropy", "uniform", "distance", "beyond"
)  # fmt: skip
HIDDEN = -1.0
"""In a map: no key of the cell is visible."""


def measures(weights: Tensor, visible: Tensor, places: Tensor, train_length: int) -> Tensor:
    """What single rows are like, as :class:`softfocus.lab.inspect.results.Row` defines it.

    Args:
        weights: [B, H, R, Lk], 0 on invisible keys.
        visible: bool [B, H, R, Lk].
        places: int64 [R], the key positions of the rows.
        train_length: the distance from which a key is beyond what training showed.

    Returns:
        [B, H, R, 9], in the order of :data:`MEASURES`.
    """
    size = weights.abs()
    count = visible.sum(-1).clamp(min=1)
    largest = size.amax(-1, keepdim=True)
    total = size.sum(-1, keepdim=True)
    share = size / torch.where(total == 0, 1.0, total)
    distance = (places[:, None] - torch.arange(weights.size(-1), device=weights.device)).abs()  # [R, Lk]
    return torch.stack(
        [
            ((weights == 0) & visible).sum(-1) / count,
            (size > 1e-9 * largest).sum(-1) / count,
            (size > 1e-3 * largest).sum(-1) / count,
            ((share < 1e-3) & visible).sum(-1) / count,
            ((share < 1e-7) & visible).sum(-1) / count,
            torch.special.entr(share).sum(-1),
            count.to(share.dtype).log(),
            (share * distance).sum(-1),
            (share * (distance >= train_length)).sum(-1),
        ],
        dim=-1,
    )


def picture(weights: Tensor, visible: Tensor, cells: int) -> Tensor:
    """Rows of weights as shares of their largest, [R, cells]: the highest of the keys in a cell,
    HIDDEN where none is visible.

    Args:
        weights: [R, Lk].
        visible: bool [R, Lk].
        cells: at most so many columns.
    """
    size = weights.abs()
    largest = size.amax(-1, keepdim=True)
    ratio = torch.where(visible, size / torch.where(largest == 0, 1.0, largest), HIDDEN)
    return torch.nn.functional.adaptive_max_pool1d(ratio, min(cells, ratio.size(-1)))
