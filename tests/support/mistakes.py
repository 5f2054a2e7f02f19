"""Mistakes of a person who types `foveal serve`, each with the line that answers it.

For tests, and for the bench that measures how soon the line comes. All need a checkpoint `model` in
the current folder, where TMP of a message is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.checkpoint_files import CONFIG, checkpoint, safetensors

PROG = "foveal-runtime serve"
SAY = "foveal-runtime"
OPTIONS: list[tuple[list[str], str | None]] = [
    ([], f"{SAY}: MODEL is missing: give a directory, or ORG/NAME of the Hugging Face hub"),
    (["model", "--kvcache", "4Gi"],
     f"{PROG}: unknown option --kvcache (did you mean --kv-cache?); see {PROG} --help"),
    (["model", "--kv-cache", "4"],
     f"{PROG}: argument --kv-cache: 4 means 4 bytes: write 4Gi or 4Mi; see {PROG} --help"),
    (["model", "--kv-cache", "lots"],
     f"{PROG}: argument --kv-cache: 'lots' is not a size: write 512Mi or 4Gi; see {PROG} --help"),
    (["model", "--kv-cache", "9" * 400],
     f"{PROG}: argument --kv-cache: '{'9' * 400}' is not a size: write 512Mi or 4Gi; see {PROG} "
     "--help"),
    (["model", "--port", "80000"],
     f"{PROG}: argument --port: 80000 is not a port: give 1 to 65535, or 0 for any; "
     f"see {PROG} --help"),
    (["model", "--engines", "0"],
     f"{PROG}: argument --engines: '0' is not a whole number of at least 1; see {PROG} --help"),
    (["model", "--memory", "90"],
     f"{PROG}: argument --memory: 90 is not a share: give 0.1 to 0.99, such as 0.9; "
     f"see {PROG} --help"),
    (["model", "--drain-timeout", "nan"],
     f"{PROG}: argument --drain-timeout: 'nan' is not a time: give seconds, such as 90; "
     f"see {PROG} --help"),
    (["model", "--start-timeout=-5"],
     f"{PROG}: argument --start-timeout: '-5' is not a time: give seconds, such as 90; "
     f"see {PROG} --help"),
    (["model", "--dtype", "int3"],
     f"{PROG}: argument --dtype: invalid choice: 'int3' (choose from 'auto', 'float32', "
     f"'bfloat16', 'float16'); see {PROG} --help"),
    (["model", "--api-key-file", "keys.txt"],
     f"{SAY}: --api-key-file keys.txt: there is no such file"),
    (["model", "--file-root", "media"], f"{SAY}: --file-root media: there is no such directory"),
    (["model", "--chat-template", "chat.jinja"],
     f"{SAY}: --chat-template chat.jinja: there is no such file"),
    (["model", "--chat-template", "model/config.json", "--request-default", "temperature"],
     f"{SAY}: --request-default temperature: write NAME=VALUE"),
    (["model", "--request-default", "temprature=1"],
     f"{SAY}: --request-default temprature=1: temprature is not one of temperature, top_p, top_k, "
     "min_p, repetition_penalty, max_tokens, chat_template_kwargs"),
    (["model", "--request-default", "temperature=200"],
     f"{SAY}: --request-default temperature=200: Expected float <= 100.0"),
    (["model", "--request-default", "chat_template_kwargs={enable_thinking: false}"],
     f"{SAY}: --request-default chat_template_kwargs={{enable_thinking: false}}: JSON is "
     "malformed: object keys must be strings (byte 1)"),
    (["model", "--port", "65535", "--frontends", "2"],
     f"{SAY}: --port 65535: the last frontend's would be 65536"),
    (["model", "--events-port", "65535"],
     f"{SAY}: --events-port 65535: the last engine's would be 65536"),
    (["model", "--port", "8000", "--events-port", "7999"],
     f"{SAY}: --events-port 7999: engines take 7999 to 8000, frontends 8000 to 8000; choose ports "
     "that do not meet"),
    (["model", "--config", "no.yaml"],
     f"{SAY}: --config no.yaml: No such file or directory"),
    (["model", "--quantization", "int8", "--tensor-parallel", "2"],
     f"{SAY}: --quantization runs on one device: leave it out, or set --tensor-parallel 1"),
    (["model", "--lora", "a=b", "--tensor-parallel", "2"],
     f"{SAY}: --lora runs on one device: leave it out, or set --tensor-parallel 1"),
    (["model", "--lora", "a=no", "--port", "0"],
     f"{SAY}: LoRA adapter 'a': TMP/no/adapter_config.json: No such file or directory"),
    (["model", "--lora", "a=model", "--plan"],
     f"{SAY}: LoRA adapter 'a': TMP/model/adapter_config.json: No such file or directory"),
    (["model", "--revision", "v1", "--port", "0"],
     f"{SAY}: --revision v1: model is a directory, which has none; leave it out"),
    (["model", "--device", "cuda"],
     f"{SAY}: --device cuda: no NVIDIA driver answers here (nvidia-smi lists no device): install "
     "the driver, give the container its devices, or use --device cpu"),
    (["model", "--host", "no-such-host.invalid"], None),
]  # fmt: skip
"""Arguments after `serve`, and what is said; None: the system's own words are part of it."""

FILES: list[tuple[str, Callable[[Path], Any], str]] = [
    ("./modle", lambda _: None, "there is no directory ./modle (did you mean model?)"),
    ("~no-such-user/model", lambda _: None,
     "~no-such-user/model: the home of user no-such-user is not known: write its whole path"),
    ("org/tiny-vl", lambda folder: (folder / "org/tiny-vlm").mkdir(parents=True),
     "there is no directory org/tiny-vl (did you mean org/tiny-vlm?); a model of the Hugging Face "
     "hub is then written hf://org/tiny-vl"),
    ("/no/such/model", lambda _: None,
     "there is no directory /no/such/model: /no does not exist; a model of the Hugging Face hub is "
     "written ORG/NAME"),
    ("/no-such-model", lambda _: None,
     "there is no directory /no-such-model: a model of the Hugging Face hub is written ORG/NAME"),
    ("a" * 300, lambda _: None, f"{'a' * 300}: File name too long"),
    ("Qwen3-VL", lambda _: None,
     "there is no directory Qwen3-VL: a model of the Hugging Face hub is written ORG/NAME"),
    ("models", lambda d: checkpoint(d / "models/qwen") and shutil.rmtree(d / "model"),
     "model models holds no config.json (did you mean models/qwen?)"),
    ("model/model.safetensors", lambda _: None,
     "model/model.safetensors is a file: give its directory, model"),
    ("qwen.gguf", lambda d: (d / "qwen.gguf").write_bytes(b"GGUF"),
     "qwen.gguf is a GGUF file, which is not supported: give a directory with safetensors"),
    ("bad", lambda d: checkpoint(d / "bad", config_json="{"),
     "model bad: config.json cannot be read: Input data was truncated"),
    ("bad", lambda d: checkpoint(d / "bad", {"a": 1}),
     "model bad: config.json names no model_type: it is not a checkpoint of transformers"),
    ("bad", lambda d: checkpoint(d / "bad", {**CONFIG, "model_type": "qwen3vl"}),
     "model bad: the installed transformers does not know model_type 'qwen3vl' (did you mean "
     "qwen3_vl or qwen3 or qwen2_vl?); code from checkpoints is never run, so give one in "
     "transformers' own format"),
    ("bad", lambda d: checkpoint(d / "bad", {**CONFIG, "model_type": "mllama"}),
     "model bad: model_type 'mllama' is multimodal and not supported (its nearest supported "
     "relatives: llama4, llava, smolvlm): choose a family of the documentation's page of supported "
     "models (its page of what is refused says why), or a plain text model"),
    ("bad", lambda d: checkpoint(d / "bad", {"model_type": "bert"}),
     "model bad: bert is an encoder: it embeds texts and generates none; serve it with --task "
     "embed (model.task: Embed)"),
    ("bad", lambda d: checkpoint(d / "bad", {"model_type": "roberta", "pad_token_id": None}),
     "model bad: pad_token_id is null in config.json, and positions of roberta begin after it: set "
     "it to the padding token's id (1 in published checkpoints)"),
    ("bad", lambda d: checkpoint(d / "bad", preprocessor_config_json=None),
     "model bad takes media and holds no preprocessor_config.json: copy the processor's files from "
     "where the model is from"),
    ("bad", lambda d: checkpoint(d / "bad", tokenizer_json=None),
     "model bad holds no tokenizer.json: copy the tokenizer's files"),
    ("bad", lambda d: checkpoint(d / "bad", **{"model.safetensors": None, "model.bin": b""}),
     "model bad holds only model.bin: give one with *.safetensors"),
    ("bad", lambda d: checkpoint(d / "bad", **{"model.safetensors": None}),
     "model bad holds no weights: give one with *.safetensors"),
    ("bad", lambda d: checkpoint(d / "bad", **{
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})}),
     "model bad is incomplete: 1 of 2 weight files are missing, model-2.safetensors among them: "
     "finish the download"),
    ("bad", lambda d: checkpoint(d / "bad", **{
        "model.safetensors.index.json": json.dumps({"weight_map": {"a": "a" * 256}})}),
     f"model bad: model.safetensors.index.json: weight_map has '{'a' * 40}', which no file can be "
     "called: copy the index again from where the model is from"),
    ("bad", lambda d: checkpoint(d / "bad", **{"model.safetensors": safetensors(4096, 100)}),
     "bad/model.safetensors has 176 of 4172 bytes: finish its download, or copy it again"),
    ("bad", lambda d: checkpoint(d / "bad", **{
        "model.safetensors": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"}),
     "bad/model.safetensors is a Git LFS pointer: run git lfs pull in its directory"),
    ("bad", lambda d: checkpoint(d / "bad", {**CONFIG, "quantization_config": {
        "quant_method": "bitsandbytes", "load_in_4bit": True}}), ""),
    ("https://huggingface.co/Qwen/Qwen3-VL-2B/tree/main", lambda _: None,
     "https://huggingface.co/Qwen/Qwen3-VL-2B/tree/main is a web page: write Qwen/Qwen3-VL-2B"),
    ("fh://org/model", lambda _: None, "fh://org/model: did you mean hf://org/model?"),
    ("pvc://claim/model", lambda _: None,
     "pvc://claim/model: only a cluster can mount pvc:// models; give a directory, ORG/NAME, "
     "s3://BUCKET/PREFIX or oci://REGISTRY/NAME:TAG"),
    ("oci://127.0.0.1:1/model:1", lambda _: None,
     "oci://127.0.0.1:1/model:1: Connection refused"),
    ("oci://127.0.0.1:1/Model", lambda _: None,
     "oci://127.0.0.1:1/Model: write oci://REGISTRY/NAME:TAG or …/NAME@sha256:DIGEST"),
    ("s3://", lambda _: None,
     "s3://: write hf://ORG/NAME, s3://BUCKET/PREFIX or oci://REGISTRY/NAME:TAG"),
]  # fmt: skip
"""MODEL, what makes it in a folder, and what is said; "": the format's name is part of it."""
