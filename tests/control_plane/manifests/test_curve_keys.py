"""Keys made without libzmq are keys that libzmq takes."""

from __future__ import annotations

import random

import pytest
import zmq
import zmq.utils.z85

from foveal_operator.manifests.curve_keys import make_keys, z85


@pytest.mark.parametrize("seed", range(20))
def test_pairs_are_libzmqs(seed: int) -> None:
    keys = make_keys(random.Random(seed).randbytes)
    for role in ("server", "client"):
        public, secret = keys[f"{role}-public"], keys[f"{role}-secret"]
        assert public.encode() == zmq.curve_public(secret.encode())
    data = random.Random(seed).randbytes(32)
    assert zmq.utils.z85.decode(z85(data)) == data


def test_two_pairs_share_nothing() -> None:
    found = make_keys(random.Random(1).randbytes).values()
    assert len(set(found)) == 4
    assert all(len(key) == 40 for key in found)
