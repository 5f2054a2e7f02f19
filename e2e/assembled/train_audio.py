"""Trains the projector between Whisper's encoder and SmolLM2 on spoken digits, on one CPU core.

    nice python -m e2e.assembled.train_audio

Nothing else learns, so what the encoder makes of a clip is computed once. First the projector
learns alone (CTC): what it makes of a clip must pass by the word embeddings of its digits, in
order, and by that of a space between them. Then it learns through the text model, from the
answers. Everything is seeded; the log has rates on voices that are never trained on. Writes
`audio-projector.safetensors` and the log.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch.nn.functional import ctc_loss, log_softmax

from e2e.assembled import speech, wordings
from e2e.assembled.assemble import AUDIO_PROJECTOR, audio_model, audio_processor
from e2e.assembled.learner import Learner, Lesson, Log, set_rate

LOG = Path(__file__).parents[2] / "e2e/results/smollm2-audio-train.log"
SEED = 5
NUM_CLIPS, NUM_CHECKED = 2000, 100
ALONE_STEPS, ALONE_BATCH, ALONE_RATE = 1000, 32, 1e-3
STEPS, BATCH, RATE = 500, 12, 5e-4
POOL = 10
"""Batches are taken from so many of them sorted by length: little of a batch is padding."""
SHARPNESS = 10.0
"""Nats between the embedding of one digit and another's, at the mean distance of two."""
PULL = 0.1
"""Weight of the distance from what an output stands for, or outputs would be far longer than words.
"""
BLANK = " "


class Heard(NamedTuple):
    """What the encoder makes of a clip (n, width), and the digits in it."""

    features: torch.Tensor
    digits: str


class Ear:
    """The encoder on whole clips, and the shortcut that training takes."""

    def __init__(self, model: Any, processor: Any) -> None:
        self._tower, self._processor = model.model.audio_tower, processor

    @torch.no_grad()
    def whole(self, clip: speech.Clip) -> torch.Tensor:
        """As the model does it: thirty seconds, the padding masked."""
        inputs, _ = self._processor._process_audio(
            [clip.samples], sampling_rate=speech.RATE, padding="max_length",
            return_attention_mask=True, return_tensors="pt",
        )  # fmt: skip
        mask = inputs["input_features_mask"]
        out = self._tower(inputs["input_features"], input_features_mask=mask).last_hidden_state
        return out[0, : int(inputs["num_audio_tokens"][0])]

    @torch.no_grad()
    def cut(self, clip: speech.Clip) -> torch.Tensor:
        """The same without the padding: what is masked changes nothing."""
        tower, extractor = self._tower, self._processor.feature_extractor
        frames = -(-len(clip.samples) // extractor.hop_length)
        padded = torch.zeros(1, (frames + 16) * extractor.hop_length)
        padded[0, : len(clip.samples)] = torch.from_numpy(clip.samples)
        mel = extractor(padded.numpy()[0], sampling_rate=speech.RATE, padding="longest",
                        return_tensors="pt")["input_features"]  # fmt: skip
        hidden = torch.nn.functional.gelu(tower.conv1(mel))
        hidden = torch.nn.functional.gelu(tower.conv2(hidden)).transpose(1, 2)
        hidden = hidden[:, : (frames - 1) // 2 + 1]
        hidden = hidden + tower.embed_positions.weight[: hidden.shape[1]]
        for layer in tower.layers:
            hidden = layer(hidden, None)
        pooled = tower.avg_pooler(hidden.transpose(1, 2)).transpose(1, 2)
        return tower.layer_norm(pooled)[0]


def learn_alone(projector: torch.nn.Module, heard: list[Heard], words: torch.Tensor, log: Log,
                steps: int) -> None:  # fmt: skip
    """CTC, with a likelihood of each embedding that falls with the squared distance from it.

    `words`: (1 + 10, width): the blank's embedding, then the digits'.
    """
    rng = random.Random(SEED)
    sharpness = SHARPNESS / torch.pdist(words[1:]).pow(2).mean()
    optimiser = torch.optim.AdamW(projector.parameters(), ALONE_RATE, weight_decay=0.01)
    total = 0.0
    for step in range(1, steps + 1):
        set_rate(optimiser, ALONE_RATE, step, steps)
        batch = rng.sample(heard, ALONE_BATCH)
        features = [one.features for one in batch]
        out = projector(torch.nn.utils.rnn.pad_sequence(features))  # (n, batch, width)
        scores = log_softmax(sharpness * (2 * out @ words.T - words.pow(2).sum(-1)), -1)
        said = torch.tensor([1 + int(digit) for one in batch for digit in one.digits])
        lengths = torch.tensor([len(one) for one in features])
        loss = ctc_loss(scores, said, lengths, torch.tensor([len(one.digits) for one in batch]))
        away = (out - scores.exp() @ words).pow(2).mean() / words.var()
        optimiser.zero_grad()
        (loss + PULL * away).backward()
        torch.nn.utils.clip_grad_norm_(projector.parameters(), 1.0)
        optimiser.step()
        total += loss.item()
        if step % 200 == 0:
            log(f"alone {step}: loss {total / 200:.4f}")
            total = 0.0


@torch.inference_mode()
def read_alone(projector: torch.nn.Module, heard: list[Heard], words: torch.Tensor) -> float:
    """The share of clips whose digits the nearest embeddings spell."""
    right = 0
    for one in heard:
        nearest = torch.cdist(projector(one.features)[None], words[None])[0].argmin(-1).tolist()
        changes = [a for a, b in zip(nearest, [0, *nearest], strict=False) if a != b]
        right += "".join(str(a - 1) for a in changes if a) == one.digits
    return right / len(heard)


class Lessons:
    """Questions about clips in the model's own chat template."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._end = processor.tokenizer.eos_token_id

    def ask(self, heard: Heard, wording: tuple[str, bool]) -> Lesson:
        processor = self._processor
        text = processor.apply_chat_template(
            wordings.messages(wording, {"type": "audio"}), add_generation_prompt=True,
            tokenize=False,
        )  # fmt: skip
        start, after = (self._ids(part) for part in text.split(processor.audio_token))
        answer = [*self._ids(heard.digits), self._end]
        return Lesson(tuple(start), (heard.features, after), answer)

    def batches(self, heard: list[Heard]) -> Any:
        """Batch of a step: each with one wording, of clips of about one length."""
        pools: dict[int, list[list[Lesson]]] = {}

        def batch_of(step: int) -> list[Lesson]:
            number, place = divmod(step - 1, POOL)
            if number not in pools:
                pools.clear()
                rng = random.Random(f"{SEED}/{number}")
                drawn = sorted(rng.sample(heard, POOL * BATCH), key=lambda one: len(one.features))
                pools[number] = [
                    [self.ask(one, wording) for one in drawn[at : at + BATCH]]
                    for at in range(0, len(drawn), BATCH)
                    for wording in [rng.choice(wordings.TRAINED)]
                ]
                rng.shuffle(pools[number])
            return pools[number][place]

        return batch_of

    def _ids(self, text: str) -> list[int]:
        return list(self._processor.tokenizer(text, add_special_tokens=False)["input_ids"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=AUDIO_PROJECTOR)
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--clips", type=int, default=NUM_CLIPS)
    parser.add_argument("--alone", type=int, default=ALONE_STEPS, help="steps of the first part")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    log = Log(options.log)
    model = audio_model()
    with TemporaryDirectory() as work:
        processor = audio_processor(Path(work))
    ear, rng = Ear(model, processor), random.Random(SEED)
    first = speech.draw(random.Random("gap"), speech.TRAINED)
    gap = (ear.whole(first) - ear.cut(first)).abs().max().item()
    log(f"seed {SEED}, {options.clips} clips of {len(speech.TRAINED)} voices, gap {gap:.1e}")
    clips = (speech.draw(rng, speech.TRAINED) for _ in range(options.clips))
    heard = [Heard(ear.cut(clip), clip.digits) for clip in clips]
    rng = random.Random("held out")
    unheard = [speech.draw(rng, speech.HELD_OUT) for _ in range(NUM_CHECKED)]
    checked = [Heard(ear.cut(clip), clip.digits) for clip in unheard]
    log(f"{sum(len(one.features) for one in heard)} outputs of the encoder")
    projector, lessons = model.model.multi_modal_projector, Lessons(processor)
    table = model.get_input_embeddings().weight.detach()
    words = table[[lessons._ids(word)[0] for word in (BLANK, *"0123456789")]].clone()
    learn_alone(projector, heard, words, log, options.alone)
    log(f"alone: {read_alone(projector, checked, words):.3f} of {NUM_CHECKED} held-out clips")
    learner = Learner(model.model.language_model, model.lm_head, projector, log)

    def check() -> str:
        save_file(
            {name: tensor.half() for name, tensor in projector.state_dict().items()}, options.out
        )
        rights = learner.right([lessons.ask(one, wordings.TRAINED[0]) for one in checked])
        return f"{sum(rights)} of {len(rights)} clips"

    log(f"step 0: held out: {check()}")
    learner.fit(lessons.batches(heard), options.steps, RATE, 75, check)
    log(f"{options.out.name}: {options.out.stat().st_size} bytes, float16")


if __name__ == "__main__":
    main()
