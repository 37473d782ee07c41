import numpy as np

from routepack.solvers.rank_loads import rank_load, unit_load


def test_rank_load_sums_the_experts_of_each_rank_and_pads_with_zeros():
    rng = np.random.default_rng(0)
    tokens_SLE = rng.integers(0, 60_000, (7, 3, 8)).astype(np.uint16)
    rank_of_LE = np.stack([rng.permutation(8) % 4 for _ in range(3)])
    load_SRL = rank_load(tokens_SLE, rank_of_LE, 4)
    for layer in range(3):
        for r in range(4):
            expected = tokens_SLE[:, layer, rank_of_LE[layer] == r].sum(axis=1, dtype=np.int64)
            assert (load_SRL[:, r, layer] == expected).all()
    assert not load_SRL[:, :, 3:].any()


def test_unit_load_sums_the_sequences_of_each_unit():
    rng = np.random.default_rng(0)
    tokens_SLE = rng.integers(0, 60_000, (7, 3, 8)).astype(np.uint16)
    unit_of_S = np.array([1, 0, 2, 1, 1, 0, 2])
    load_LEU = unit_load(tokens_SLE, unit_of_S, 3)
    for u in range(3):
        assert (load_LEU[:, :, u] == tokens_SLE[unit_of_S == u].sum(axis=0, dtype=np.int64)).all()
