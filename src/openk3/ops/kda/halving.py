"""Inside a chunk: every pair of tokens, by joining halves (report §2.1.1 eq. 3-4).

Row i reads what an earlier row j wrote, through the decays between them:

    pair_ij = read_i . (alpha_{j+1} * ... * alpha_i * write_j)     read_i = k_i or q_i,  write_j = beta_j k_j

k reads what the delta rule predicts, q the output. Eq. 4 takes those decays as a quotient of two cumulative
products, which overflows in finite precision. Here blocks of h = 1, 2, 4, ... rows are joined two by two, and
in each block

    left_i  = read_i  * decays from the block's first row through row i
    right_j = write_j * decays from the row after j through the block's last
    decay   = product over the block

so that pair_ij = left_i . right_j for i in a block and j in the one before it: all pairs of two neighbours
are one dense product. Joining multiplies the second's left by the first's decay, and the first's right by
the second's. Every factor is a product of alphas and cannot exceed 1, whatever the gate; nothing is divided;
and a pair meets only the gates between its rows, so nothing depends on a later token, not even in a last bit.

The UT transform comes along. With L the pairs of k (strictly lower), the prediction errors solve
(I + L) E = V - left_k S^T, and the inverse of two joined blocks has their inverses on its diagonal and
-inverse_2 L_21 inverse_1 below it: forward substitution by blocks. For unit keys and beta in [0, 1] no entry
of it exceeds 1: entry ij is what the error at i owes to v_j, a product of k_i, contractions and beta_j k_j.

The backward walks the same tree down. The gradient to a log decay is the sum of pair times gradient over the
pairs that span it. The tree adds just those; the usual reverse cumulative sum over the chunk adds all pairs
and leaves the rounding noise of those that cancel.

Knows nothing of sequences and states. B tiles of R rows (a power of two); axis 1 of `[B, 2, R, .]` is (k, q).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

Tensor = torch.Tensor


class Rows(NamedTuple):
    """What each row of a tile brings; zero rows with alpha 1 where there is no token."""

    reads: Tensor  # [B, 2, R, K]: k and q
    writes: Tensor  # [B, R, K]: beta k
    alpha: Tensor  # [B, R, K] in [0, 1]


class Chunks(NamedTuple):
    """What the recurrence between chunks needs to know of each."""

    left: Tensor  # [B, 2, R, K]
    right: Tensor  # [B, R, K]
    decay: Tensor  # [B, K]
    inverse: Tensor  # [B, R, R]: (I + L)^-1, lower triangular with unit diagonal
    attention: Tensor  # [B, R, R]: A of eq. 4, lower triangular, with beta_j in column j


class Joint(NamedTuple):
    """n pairs of h-row blocks just before they are joined: what the backward needs of them."""

    left: Tensor  # [n, 2h, K], of the second block: k rows, then q rows
    right: Tensor  # [n, h, K], of the first block
    decay: Tensor  # [n, 2, K], of both


def join(rows: Rows) -> tuple[Chunks, list[Joint]]:
    """All pairs of each tile, and the joints from small to large."""
    B, _, R, K = rows.reads.shape
    left, right = rows.reads * rows.alpha[:, None], rows.writes.clone()
    decay = rows.alpha.reshape(B * R, K)
    inverse = right.new_ones(B * R, 1, 1)
    attention = torch.diag_embed((rows.reads[:, 1] * rows.writes).sum(-1))
    joints = []
    h = 1
    while h < R:
        n = B * R // (2 * h)
        second, first = _second(left, h), _first(right, h)
        joint = Joint(_copy(second.transpose(1, 2), n), _copy(first, n), decay.view(n, 2, K))
        joints.append(joint)
        pairs = joint.left @ joint.right.mT  # [n, 2h, h]
        _blocks_below(attention, h).copy_(pairs[:, h:].view(B, -1, h, h))
        inverse = _lower(inverse, (inverse[1::2] @ pairs[:, :h] @ inverse[0::2]).neg_())
        before, after = joint.decay.view(B, -1, 2, 1, K).unbind(2)
        second.mul_(before[:, None])
        first.mul_(after)
        decay = joint.decay[:, 0] * joint.decay[:, 1]
        h *= 2
    return Chunks(left, right, decay, inverse, attention), joints


def join_backward(
    rows: Rows,
    chunks: Chunks,
    joints: list[Joint],
    d_pair_left: Tensor,
    d_pair_right: Tensor,
    d_left: Tensor,
    d_right: Tensor,
    d_log_decay: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to reads, writes and log alpha.

    Args:
        rows, chunks, joints: of `join`.
        d_pair_left, d_pair_right: `[B, 2, R, V]` and `[B, R, V]`, the factors of the pairs' gradient:
            that of pair_ij is d_pair_left_i . d_pair_right_j, so it need not be stored whole either.
        d_left, d_right: gradients to `chunks.left` and `chunks.right`; overwritten.
        d_log_decay: `[B, K]`, gradient to the logarithm of `chunks.decay`.
    """
    B, _, R, K = rows.reads.shape
    V = d_pair_right.shape[-1]
    # Gradients to the logarithms of the decays in each row of left and of right.
    log_left = torch.addcmul(chunks.left[:, 0] * d_left[:, 0], chunks.left[:, 1], d_left[:, 1])
    log_right = chunks.right * d_right
    for joint in reversed(joints):
        n, h, _ = joint.right.shape
        blocks = R // (2 * h)
        d_second, d_first = _second(d_left, h), _first(d_right, h)
        log_second, log_first = _second(log_left, h), _first(log_right, h)
        # Before joining: the first block's decay was in the second's left, the second's in the first's right.
        before, after = joint.decay.view(B, blocks, 2, 1, K).unbind(2)
        d_second.mul_(before[:, None])
        d_first.mul_(after)
        spans = torch.stack([log_second.sum(2), log_first.sum(2)], 2)  # [B, blocks, 2, K]
        d_log_decay = spans.add_(d_log_decay.view(B, blocks, 1, K))
        # The pairs of the two blocks.
        d_pairs = (
            _second(d_pair_left, h).transpose(1, 2).reshape(n, 2 * h, V)
            @ _first(d_pair_right, h).reshape(n, h, V).mT
        )
        d_second.add_(_product(d_pairs, joint.right).view(B, blocks, 2, h, K).transpose(1, 2))
        d_first.add_(_product(d_pairs.mT, joint.left).view(B, blocks, h, K))
        k_left, q_left = joint.left.view(B, blocks, 2, h, K).unbind(2)
        torch.mul(k_left, d_second[:, 0], out=log_second)
        log_second.addcmul_(q_left, d_second[:, 1])
        torch.mul(joint.right.view(B, blocks, h, K), d_first, out=log_first)
    # Blocks of one row: left = read * alpha, right = write, and each row's q reads its own write undecayed.
    d_log_alpha = log_left.add_(d_log_decay.view(B, R, K))
    d_own = (d_pair_left[:, 1] * d_pair_right).sum(-1, keepdim=True)
    d_reads = d_left.mul_(rows.alpha[:, None])
    d_reads[:, 1].addcmul_(d_own, rows.writes)
    d_writes = d_right.addcmul_(d_own, rows.reads[:, 1])
    return d_reads, d_writes, d_log_alpha


def _first(x: Tensor, h: int) -> Tensor:
    """The first of every two blocks of h rows: a view `[..., R / 2h, h, F]` of `[..., R, F]`."""
    return x.view(*x.shape[:-2], -1, 2, h, x.shape[-1]).select(-3, 0)


def _second(x: Tensor, h: int) -> Tensor:
    """The second of every two blocks of h rows: a view `[..., R / 2h, h, F]` of `[..., R, F]`."""
    return x.view(*x.shape[:-2], -1, 2, h, x.shape[-1]).select(-3, 1)


def _copy(blocks: Tensor, n: int) -> Tensor:
    """`[..., h, F]` as a copy `[n, -1, F]`, safe from what happens in place to the original."""
    return blocks.clone(memory_format=torch.contiguous_format).view(n, -1, blocks.shape[-1])


def _lower(diagonal: Tensor, below: Tensor) -> Tensor:
    """Lower triangular `[n, 2h, 2h]` of diagonal blocks `[2n, h, h]` and what is below them `[n, h, h]`."""
    n, h, _ = below.shape
    out = below.new_zeros(n, 2 * h, 2 * h)
    out[:, :h, :h], out[:, h:, h:], out[:, h:, :h] = diagonal[0::2], diagonal[1::2], below
    return out


def _blocks_below(x: Tensor, h: int) -> Tensor:
    """What a join of h-row blocks fills, below the diagonal: a view `[B, R / 2h, h, h]` of `[B, R, R]`."""
    B, R, _ = x.shape
    second_to_first = x.view(B, R // (2 * h), 2, h, R // (2 * h), 2, h)[:, :, 1, :, :, 0]
    return second_to_first.diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, by broadcasting where a is one row or column: batched matrix products are slow at those."""
    if a.shape[-1] == 1:
        return a * b
    if a.shape[-2] == 1:
        return (a.mT * b).sum(-2, keepdim=True)
    return a @ b
