"""The bench's questions with known answers, and the reader of the weights behind them."""

from __future__ import annotations

import io
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from e2e.assembled import assemble, parts
from e2e.assembled.learner import Learner, Lesson, Log
from e2e.bench.checkpoints import ASSEMBLED
from e2e.bench.truths import truths
from tests.support import packages


def model_file(tensors: dict[str, np.ndarray], version: int = 6) -> io.BytesIO:
    """A file in CTranslate2's format; float16 like the published one."""

    def text(word: str) -> bytes:
        return struct.pack("<H", len(word) + 1) + word.encode() + b"\0"

    data = struct.pack("<I", version) + text("WhisperSpec") + struct.pack("<II", 3, len(tensors))
    for name, tensor in tensors.items():
        data += text(name) + struct.pack("<B", tensor.ndim)
        data += struct.pack(f"<{tensor.ndim}I", *tensor.shape)
        data += struct.pack("<BI", 4, tensor.nbytes) + tensor.tobytes()
    return io.BytesIO(data)


def test_weights_are_read_and_renamed() -> None:
    """Query, key and value are one tensor there and three here; the key has no bias."""
    rng = np.random.default_rng(1)
    layer, names = "encoder/layer_0", {}
    linears = ("self_attention/linear_0", "self_attention/linear_1", "ffn/linear_0", "ffn/linear_1")
    for name in ("encoder/conv1", "encoder/conv2", *(f"{layer}/{one}" for one in linears)):
        names |= {f"{name}/weight": (12, 4), f"{name}/bias": (12,)}
    for name in ("encoder", f"{layer}/self_attention", f"{layer}/ffn"):
        names |= {f"{name}/layer_norm/gamma": (4,), f"{name}/layer_norm/beta": (4,)}
    names["encoder/position_encodings/encodings"] = (5, 4)
    tensors = {n: rng.standard_normal(shape).astype(np.float16) for n, shape in names.items()}
    found = dict(parts._renamed(dict(parts._variables(model_file(tensors)))))
    whole = torch.from_numpy(tensors[f"{layer}/self_attention/linear_0/weight"].astype("f4"))
    rows = [found[f"layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(torch.cat(rows), whole)
    assert "layers.0.self_attn.k_proj.bias" not in found
    assert found["layers.0.self_attn.v_proj.bias"].shape == (4,)
    assert len(found) == len(tensors) + 3


def test_another_version_is_refused() -> None:
    with pytest.raises(packages.Mismatch, match="version 5, not 6"):
        dict(parts._variables(model_file({}, version=5)))


def test_another_tower_is_refused(monkeypatch) -> None:
    """Regression: the tests of the model that it belongs to were skipped."""
    assert assemble.bundled_tower()
    monkeypatch.setattr(assemble, "TOWER_SHA256", "0" * 64)
    with pytest.raises(packages.Mismatch, match="is another one"):
        assemble.bundled_tower()


def test_lessons_that_share_an_image_learn_as_if_each_had_its_own(tmp_path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model, projector = LlamaForCausalLM(config), torch.nn.Linear(8, 32)
    learner = Learner(model.model, model.lm_head, projector, Log(tmp_path / "log"))
    one, other = torch.randn(2, 5, 8)
    asked = [(one, [7, 8], [9, 2]), (other, [7, 8, 11], [4, 2]), (one, [13], [5, 6, 2])]
    shared = [Lesson((1, 3), (text,), answer, seen) for seen, text, answer in asked]
    apart = [Lesson((1, 3), (seen, text), answer) for seen, text, answer in asked]
    swapped = [lesson._replace(seen=one) for lesson in shared]
    scores, gradients = [], []
    for lessons in (shared, apart, swapped):
        projector.zero_grad()
        found, targets, owners = learner._answers(lessons)
        torch.nn.functional.cross_entropy(found.float(), targets).backward()
        scores.append(found.float())
        gradients.append(projector.weight.grad.clone())
    assert owners.tolist() == [0, 0, 1, 1, 2, 2, 2]
    for found in (scores, gradients):
        spread = found[1].std()
        assert (found[0] - found[1]).abs().max() < 0.1 * spread
        assert (found[2] - found[1]).abs().max() > 0.3 * spread


@pytest.mark.extended
@pytest.mark.parametrize("model", ASSEMBLED)
def test_answers_are_those_of_the_items(model) -> None:
    asked, again, other = packages.or_skip(lambda: [truths(model, n, 12) for n in (1, 1, 2)])
    assert asked.answers == again.answers != other.answers
    sent = [questions[0].messages for questions in asked.trace.conversations]
    assert len({str(messages) for messages in sent}) == 4
    texts = [*asked.answers[:9], "no", "", "no idea"]
    assert asked.share(SimpleNamespace(texts=texts)) == 0.75
