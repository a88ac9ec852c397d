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
from numpy.linalg import norm, pinv, qr, svd
from threadpoolctl import threadpool_limits

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
    from scipy.sparse import csr_matrix

    V, D = model.head_weight.shape
    pairs_P, counts_P = np.unique(first_N * V + next_N, return_counts=True)
    rows_P, columns_P = np.divmod(pairs_P, V)
    first_V = np.bincount(first_N, minlength=V)
    share_V = (np.bincount(next_N, minlength=V) + 1) / (len(next_N) + V)
    row_V1, column_V1 = np.sqrt(first_V + 1)[:, None], np.sqrt(share_V)[:, None]
    values_P = np.log1p(counts_P / (SMOOTHING * share_V[columns_P])) * row_V1[rows_P, 0] * column_V1[columns_P, 0]
    matrix_VV = csr_matrix((values_P.astype(np.float32), (rows_P, columns_P)), shape=(V, V))
    draw = np.random.default_rng(seed)
    with threadpool_limits(1):
        basis_VK = draw.standard_normal((V, D - 1), dtype=np.float32)
        for _ in range(ROUNDS + 1):  # Halko et al. 2011, arXiv:0909.4061
            basis_VK = qr(matrix_VV.T @ qr(matrix_VV @ basis_VK).Q).Q
        left_VK, size_K, turn_KK = svd(matrix_VV @ basis_VK, full_matrices=False)
        left_VK, right_VK = left_VK * np.sqrt(size_K) / row_V1, basis_VK @ turn_KK.T * np.sqrt(size_K) / column_V1
        # Embeddings are as long as sqrt(D), about as after training: the norm then hardly changes the products.
        length = np.average(norm(left_VK, axis=1), weights=first_V) / np.sqrt(1 - COMMON**2)
        embedding_VD = np.concatenate((np.full((V, 1), COMMON), left_VK / length), 1)
        embedding_VD *= np.sqrt(D) / norm(embedding_VD, axis=1, keepdims=True)
        log_V1 = np.log(share_V)[:, None]
        head_VD = np.concatenate(((log_V1 - log_V1.mean()) / COMMON, right_VK * length), 1) / np.sqrt(D)
        # Turned at random, or one element of all would be far larger than the others.
        turn_DD = qr(draw.standard_normal((D, D))).Q
        known_V1 = torch.from_numpy(first_V > 0)[:, None]
        weight_VD = model.model.embed_tokens.weight
        weight_VD.copy_(torch.where(known_V1, torch.from_numpy(embedding_VD @ turn_DD), weight_VD))
        model.head_weight.copy_(torch.from_numpy(head_VD @ turn_DD))
        _copy(model, embedding_VD, head_VD, turn_DD, first_V / first_V.sum())


def _copy(
    model: Transformer, embedding_VD: np.ndarray, head_VD: np.ndarray, turn_DD: np.ndarray, first_V: np.ndarray
) -> None:
    """Let two heads predict what came after an earlier occurrence of the id (Olsson et al. 2022, arXiv:2209.11895).

    Gradients are slow to find the two together. The first head of the first
    layer looks at the position before, whatever stands there: its queries and
    keys read only the direction that all embeddings share, and turned by rotary
    positions they agree best one apart. What tells that id from others it
    writes to the directions that embeddings use least. There the first head of
    the second layer compares it with the id at hand, in slow angles, which
    distance hardly turns, and copies the id that it finds to the output.

    Columns of the two factors are in order of size, before `turn_DD`; first_V: shares. Queries and keys
    are as long as a norm of them would make them, sqrt(H).
    """
    config, H = model.config, model.config.head_dim
    weighted_DV = (embedding_VD * first_V[:, None]).T
    moments_DD = weighted_DV @ embedding_VD
    size_H1 = np.sqrt(moments_DD.diagonal()[1 : H + 1, None]).clip(0.1)
    read_HD, write_HD = turn_DD[1 : H + 1] / size_H1, turn_DD[-H:]
    angles_2E = rotary_table(config, 2).double().numpy()
    fast_E = angles_2E[1, 1] > SLOWEST
    here_H1, before_H1 = (angles_2E * fast_E).reshape(2, H, 1) * np.sqrt(H / config.dim / fast_E.sum()) / COMMON
    slow_H1 = np.sqrt(2) * (np.arange(H) % (H // 2) >= H // 4)[:, None]
    own_DD = weighted_DV @ (head_VD - first_V @ head_VD)
    found_DD, size_D, said_DD = svd(pinv(moments_DD, 1e-6) @ own_DD)
    half_H1 = np.sqrt(size_D[:H, None])
    found_HD, said_HD = half_H1 * found_DD.T[:H], half_H1 * said_DD[:H]
    strength = np.sqrt(COPIED / (found_HD.T @ said_HD * own_DD).sum())
    heads = (
        (here_H1 * turn_DD[0], before_H1 * turn_DD[0], read_HD, write_HD),
        (slow_H1 * read_HD, slow_H1 * write_HD, strength * found_HD @ turn_DD, strength * said_HD @ turn_DD),
    )
    for block, (query_HD, key_HD, value_HD, out_HD) in zip(model.model.layers, heads, strict=False):
        attention = block.self_attn
        attention.q_proj.weight[:H] = torch.from_numpy(query_HD)
        attention.k_proj.weight[:H] = torch.from_numpy(key_HD)
        attention.v_proj.weight[:H] = torch.from_numpy(value_HD)
        attention.o_proj.weight[:, :H] = torch.from_numpy(out_HD.T)
