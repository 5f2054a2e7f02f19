"""`helm test`: the API server takes a legal resource, refuses an illegal one, stores neither."""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
URL = (
    "https://kubernetes.default.svc/apis/foveal.dev/v1alpha1/namespaces/"
    + os.environ["NAMESPACE"]
    + "/multimodalinferences?dryRun=All&fieldValidation=Strict"
)


def post(spec: dict) -> tuple[int, str]:
    body = {
        "apiVersion": "foveal.dev/v1alpha1",
        "kind": "MultiModalInference",
        "metadata": {"name": "helm-test"},
        "spec": spec,
    }
    with open(ACCOUNT + "/token", encoding="ascii") as file:
        token = file.read()
    request = urllib.request.Request(
        URL,
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + token, "Content-Type": "application/json"},
    )
    context = ssl.create_default_context(cafile=ACCOUNT + "/ca.crt")
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def expect(status: int, spec: dict) -> None:
    for _ in range(10):  # a new role and the cluster's DNS take a moment
        try:
            found, text = post(spec)
        except OSError as error:
            found, text = 0, str(error)
        if found == status:
            print("ok", status, json.dumps(spec))
            return
        time.sleep(1)
    sys.exit(f"expected {status}, got {found}: {text}")


expect(201, {"model": {"uri": "hf://Qwen/Qwen2.5-VL-7B-Instruct"}})
expect(422, {"model": {"uri": "nowhere"}})
