# SPDX-License-Identifier: Apache-2.0
"""Arrays that clusters share: what their views have in common."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu import errors
from pallas_gpu.emulator.engine.ordering import Access
from pallas_gpu.emulator.engine.poison import Origin, Poisoned
from pallas_gpu.emulator.gpu.gmem import GlobalArray
from pallas_gpu.emulator.gpu.machine.races import ClusterViewer
from tests.support import everywhere


def array(shape):
    data = np.zeros(shape, np.float32)
    return GlobalArray("out", data, np.zeros(shape, np.bool_))


def write(view, actor, low, high):
    new = Access(((low, high),), True, actor, 1, False, "who", viewer=view.viewer)
    view.history.access(new, {actor: 1}, view.name)


def test_the_views_of_clusters_share_a_history():
    whole = array((8,))
    first, second = (whole.seen_by(ClusterViewer(f"CTA {i}")) for i in range(2))
    write(first, 0, 0, 4)
    write(second, 4, 4, 8)
    with pytest.raises(errors.RaceError, match=r"written by CTA 0 .* by CTA 1"):
        write(second, 4, 3, 4)


def test_a_cluster_knows_where_the_poison_of_another_one_comes_from():
    whole = array((8,))
    whole.admits_poison = True
    first, second = (whole.seen_by(ClusterViewer(f"CTA {i}")) for i in range(2))
    origin = Origin("it is read", "element [4]", "write it", "k:1")
    mask = np.arange(8) >= 4
    first.whole().store(Poisoned(np.zeros(8, np.float32), mask, origin))
    read = second.whole()
    assert read.origin(read.missing(), "k:2") is origin


def test_different_parts_of_an_array_have_different_histories():
    whole = array((2, 4))
    first, second = (
        whole.at((i,)).seen_by(ClusterViewer(f"vmap index {i}")) for i in range(2)
    )
    write(first, 0, 0, 4)
    write(second, 4, 0, 4)
    assert first.data.base is whole.data


def test_an_input_is_not_watched():
    data = np.zeros((8,), np.float32)
    view = GlobalArray("in", data, None, read_only=True)
    assert view.seen_by(ClusterViewer("CTA 0")) is view


def test_a_result_of_one_element_can_be_read_and_written():
    def body(x, o):
        o[...] = jnp.sum(x[...])
        o[...] += 1

    everywhere.run(body, [jnp.ones(128)], np.float32(129))
