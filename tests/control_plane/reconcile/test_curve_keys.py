"""Keys made without libzmq are keys that libzmq takes."""

from __future__ import annotations

import random

import pytest
import zmq
import zmq.utils.z85

from foveal_operator.reconcile.curve_keys import make_key_pairs, z85


@pytest.mark.parametrize("seed", range(20))
def test_pairs_are_libzmqs(seed: int) -> None:
    keys = make_key_pairs(random.Random(seed).randbytes)
    for public, secret in (
        (keys.server_public, keys.server_secret),
        (keys.client_public, keys.client_secret),
    ):
        assert public.encode() == zmq.curve_public(secret.encode())
    data = random.Random(seed).randbytes(32)
    assert zmq.utils.z85.decode(z85(data)) == data


def test_two_pairs_share_nothing() -> None:
    source = random.Random(1)
    keys = make_key_pairs(source.randbytes)
    found = {keys.server_public, keys.server_secret, keys.client_public, keys.client_secret}
    assert len(found) == 4
    assert all(len(key) == 40 for key in found)
