"""Attention over packed rows: masks, each with one method `attend`.

The function `sees` says which tokens of a row a token sees, by `positions` and `ends`, int [B, T],
which the top of model.py explains: a row holds separate documents, or trees of prompts.

    attend(q [B, H, T, hd], k [B, H_kv, T, hd], v [B, H_kv, T, hd], scale, softcap) -> [B, H, T, hd]

computes softmax(scale q k^T) v over the visible keys; with a softcap, a score s becomes
softcap * tanh(s / softcap). A mask of your own needs that method only.

To change attention, edit `sees` or ExplicitMask. speed/masks.py has faster masks, which name the
functions that they stand for; after an edit a note says so, and ExplicitMask is used. This file
imports nothing of ours and can be copied into another project.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# What computes attention in training, evaluation and decoding once speed/ is installed: 'auto' is
# the fastest that stands for ExplicitMask. 'explicit' is plain torch everywhere; 'flex' is
# FlexAttention, and plain torch for decoding over a cache.
IMPLEMENTATION = 'auto'


def sees(i: Tensor, j: Tensor, i_position: Tensor, j_position: Tensor, j_end: Tensor,
         window: int | None) -> Tensor:
    """Return whether the token at row index i sees the one at j: the rule of all masks.

    i_position, j_position: the positions of the two in their texts; j_end: ends[j]
    """
    visible = (j <= i) & (i < j_end)
    return visible if window is None else visible & (i_position - j_position < window)


def visible_keys(positions: Tensor, ends: Tensor, window: int | None) -> Tensor:
    """Return bool [B, 1, T, T]: does the token at row index i, axis 2, see that at j, axis 3?"""
    index = torch.arange(ends.shape[1], device=ends.device)
    return sees(index[:, None], index, positions[:, :, None], positions[:, None], ends[:, None],
                window)[:, None]


class ExplicitMask:
    """A matrix of the visible keys [B, 1, T, T]; with None each token sees all before it."""

    def __init__(self, visible: Tensor | None = None):
        self.visible = visible

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None):
        visible, group = self.visible, q.shape[1] // k.shape[1]
        if softcap is None:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=visible, is_causal=visible is None, scale=scale,
                enable_gqa=group > 1)
        if visible is None:
            visible = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        # cap before masking: minus infinity would be capped to -softcap
        scores = softcap * torch.tanh((q @ k.mT).float() * scale / softcap)
        return scores.masked_fill(~visible, -torch.inf).softmax(-1).to(v.dtype) @ v


def make_masks(decoder, positions: Tensor, ends: Tensor | None):
    """Return a list with the mask of each layer of model.Decoder, equal windows sharing one.

    ends: None if each row is one document, perhaps followed by padding
    """
    if ends is None:
        ends = torch.full_like(positions, positions.shape[1])
    windows = decoder.config.windows
    masks = {window: ExplicitMask(visible_keys(positions, ends, window)) for window in {*windows}}
    return [masks[window] for window in windows]
