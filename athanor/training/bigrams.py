"""First weights that know pairs of ids, and how to copy.

The blocks add little at the start, so embedding and output matrix alone decide
what a fresh model says. After a look at the ids and one factorisation they say
what a bigram model does, and two heads repeat what came after an id before.
Steps that gradients would need to find that teach something else then;
docs/decisions.md has what it gains.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.linalg import pinv, qr, svd, vector_norm

from athanor.base.errors import ParamsError
from athanor.data.shards import open_train
from athanor.model.config import ModelConfig
from athanor.model.transformer import Transformer, rotary_table

SMOOTHING = 1000.0  # pairs as ids are frequent, that every id is thought to have begun besides those counted
COMMON = 0.7  # of an embedding's length, in the direction that all share: it carries how frequent the next id is anyway
SLOWEST = 0.2  # radians from one position to the next, that the head goes by which looks at the one before
COPIED = 5.0  # nats that the copying head adds where it is sure, for an id as frequent as they come
ROUNDS = 2  # of the factorisation; 1 and 4 gave the same


def first_model(config: ModelConfig, seed: int, shards: Path, bigram_tokens: int) -> Transformer:
    """An untrained model on the CPU; with `bigram_tokens` it knows the pairs among so many ids of the training stream."""
    model = Transformer.fresh(config, seed)
    if bigram_tokens:
        if config.tied_embeddings or config.head_dim >= config.dim:
            what = "needs an output matrix of its own, and heads smaller than the model"
            raise ParamsError(what, where="pretrain.bigram_tokens", fix="use 0")
        stream = open_train(shards)
        ids_N = stream.read(0, min(bigram_tokens, stream.tokens))
        inside_N = np.diff(stream.document_of(np.arange(len(ids_N)))) == 0
        know_pairs(model, ids_N[:-1][inside_N], ids_N[1:][inside_N], seed)
    return model


@torch.no_grad()
def know_pairs(model: Transformer, first_N: np.ndarray, next_N: np.ndarray, seed: int) -> None:
    """Set embedding and output matrix so that softmax(head · norm(embedding)) is about p(next | first), smoothed.

    log p(n | f) = log p(n) + log(1 + count(f, n) / (SMOOTHING · p(n))) + a
    constant of f. The second term is 0 for pairs that never came, so the matrix
    of all pairs is sparse, and its largest singular vectors, weighted by how
    much a pair matters, are the two factors. The first term goes to a direction
    that all embeddings share. Ids that never came first keep their random
    embedding. One thread, so that other machines and processes get the same.
    """
    V, D = model.head_weight.shape
    pairs_P, counts_P = np.unique(first_N * V + next_N, return_counts=True)
    rows_P, columns_P = torch.from_numpy(np.stack(np.divmod(pairs_P, V)))
    first_V = torch.from_numpy(np.bincount(first_N, minlength=V)).double()
    share_V = torch.from_numpy(np.bincount(next_N, minlength=V) + 1.0) / (len(next_N) + V)
    row_V1, column_V1 = (first_V + 1).sqrt()[:, None], share_V.sqrt()[:, None]
    values_P = torch.log1p(torch.from_numpy(counts_P) / (SMOOTHING * share_V[columns_P]))
    values_P = (values_P * row_V1[rows_P, 0] * column_V1[columns_P, 0]).float()
    pairs_VV = torch.sparse_coo_tensor(
        torch.stack((rows_P, columns_P)), values_P, (V, V), is_coalesced=True, check_invariants=True
    )
    draw, threads = torch.Generator().manual_seed(seed), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        basis_VK = torch.randn(V, D - 1, generator=draw)
        for _ in range(ROUNDS + 1):  # Halko et al. 2011, arXiv:0909.4061
            basis_VK = qr(pairs_VV.t() @ qr(pairs_VV @ basis_VK).Q).Q
        left_VK, size_K, turn_KK = (part.double() for part in svd(pairs_VV @ basis_VK, full_matrices=False))
        left_VK = left_VK * size_K.sqrt() / row_V1
        right_VK = basis_VK.double() @ turn_KK.T * size_K.sqrt() / column_V1
        # Embeddings are as long as sqrt(D), about as after training: the norm then hardly changes the products.
        shares_V = first_V / first_V.sum()
        length = vector_norm(left_VK, dim=1) @ shares_V / (1 - COMMON**2) ** 0.5
        embedding_VD = torch.cat((torch.full_like(row_V1, COMMON), left_VK / length), 1)
        embedding_VD *= D**0.5 / vector_norm(embedding_VD, dim=1, keepdim=True)
        log_V1 = share_V.log()[:, None]
        head_VD = torch.cat(((log_V1 - log_V1.mean()) / COMMON, right_VK * length), 1) / D**0.5
        # Turned at random, or one element of all would be far larger than the others.
        turn_DD = qr(torch.randn(D, D, generator=draw).double()).Q
        weight_VD = model.model.embed_tokens.weight
        weight_VD.copy_(torch.where(first_V[:, None] > 0, embedding_VD @ turn_DD, weight_VD))
        model.head_weight.copy_(head_VD @ turn_DD)
        _copy(model, embedding_VD, head_VD, turn_DD, shares_V)
    finally:
        torch.set_num_threads(threads)


def _copy(model: Transformer, embedding_VD: Tensor, head_VD: Tensor, turn_DD: Tensor, shares_V: Tensor) -> None:
    """Let two heads predict what came after an earlier occurrence of the id (Olsson et al. 2022, arXiv:2209.11895).

    Gradients are slow to find the two together. The first head of the first
    layer looks at the position before, whatever stands there: its queries and
    keys read only the direction that all embeddings share, and turned by rotary
    positions they agree best one apart. What tells that id from others it
    writes to the directions that embeddings use least. There the first head of
    the second layer compares it with the id at hand, in slow angles, which
    distance hardly turns, and copies the id that it finds to the output.

    Columns of the two factors are in order of size, before `turn_DD`. Queries and keys are as long as a norm
    of them would make them, sqrt(H).
    """
    config, H = model.config, model.config.head_dim
    weighted_DV = (embedding_VD * shares_V[:, None]).T
    moments_DD = weighted_DV @ embedding_VD
    size_H1 = moments_DD.diagonal()[1 : H + 1, None].sqrt().clip(0.1)
    read_HD, write_HD = turn_DD[1 : H + 1] / size_H1, turn_DD[-H:]
    angles_2E = rotary_table(config, 2).double()
    fast_E = angles_2E[1, 1] > SLOWEST
    here_H1, before_H1 = (angles_2E * fast_E).view(2, H, 1) * (H / config.dim / fast_E.sum()).sqrt() / COMMON
    slow_H1 = 2**0.5 * (torch.arange(H) % (H // 2) >= H // 4)[:, None]
    own_DD = weighted_DV @ (head_VD - shares_V @ head_VD)
    found_DD, size_D, said_DD = svd(pinv(moments_DD, rtol=1e-6) @ own_DD)
    half_H1 = size_D[:H, None].sqrt()
    found_HD, said_HD = half_H1 * found_DD.T[:H], half_H1 * said_DD[:H]
    strength = (COPIED / (found_HD.T @ said_HD * own_DD).sum()).sqrt()
    heads = (
        (here_H1 * turn_DD[0], before_H1 * turn_DD[0], read_HD, write_HD),
        (slow_H1 * read_HD, slow_H1 * write_HD, strength * found_HD @ turn_DD, strength * said_HD @ turn_DD),
    )
    for block, (query_HD, key_HD, value_HD, out_HD) in zip(model.model.layers, heads, strict=False):
        attention = block.self_attn
        attention.q_proj.weight[:H] = query_HD
        attention.k_proj.weight[:H] = key_HD
        attention.v_proj.weight[:H] = value_HD
        attention.o_proj.weight[:, :H] = out_HD.T
