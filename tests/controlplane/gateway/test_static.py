"""A cluster out of a TOML file: what it says, and every fault named."""

import json

import pytest

from controlplane.gateway.static import load_static
from workers.core.errors import ConfigError

GOOD = """
[[worker]]
url = "http://10.0.0.1:8000"
role = "prefill"
model = "m"
handshake = "mooncake"
bootstrap = "http://10.0.0.1:8998"

[[worker]]
id = "d"
url = "http://10.0.0.2:8000"
role = "decode"
model = "m"
handshake = "mooncake"
max_concurrent_requests = 64

[[model]]
id = "m"
tokenizer = "/models/m"

[policy.slo]
mode = "enforce"
max_ttft_ms = 500
"""


def read(tmp_path, text):
    file = tmp_path / "workers.toml"
    file.write_text(text)
    return load_static(str(file))


def test_workers_models_and_policies(tmp_path):
    view = read(tmp_path, GOOD)
    prefill, decode = view.workers
    assert (prefill.id, prefill.role, prefill.handshake) == (
        "http://10.0.0.1:8000", "prefill", "mooncake",
    )  # fmt: skip
    assert prefill.bootstrap == "http://10.0.0.1:8998"
    assert (decode.id, decode.max_concurrent_requests, decode.state) == ("d", 64, "ready")
    assert [(m.id, m.path) for m in view.models] == [("m", "/models/m")]
    assert [(p.kind, p.scope, p.spec["mode"]) for p in view.policies] == [
        ("slo", "default", "enforce")
    ]


def json_view(*, spec=None, twice=False, **worker):
    row = {"id": "w", "node_id": "n", "role": "both", "model": "m", "url": "http://a:1",
           "state": "ready", **worker}  # fmt: skip
    policy = {"kind": "scheduling", "scope": "default", "revision": 1, "spec": spec or {}}
    return json.dumps({"workers": [row] * (1 + twice), "policies": [policy]})


WORKER = '[[worker]]\nurl = "http://a:1"\nrole = "both"\nmodel = "m"\n'


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "worker"),
        ("worker = []", "lists 0 workers"),
        ("[[worker]", "is no TOML"),
        ('[[worker]]\nrole = "both"\nmodel = "m"', "url"),
        (WORKER.replace("both", "router"), "role"),
        (WORKER.replace("http://a:1", "a:1"), "worker[1].url"),
        (WORKER + 'handshake = "smoke"', "handshake"),
        (WORKER + 'handshake = "mooncake"', "worker[1].bootstrap"),
        (WORKER + 'bootstrap = "http://a:2"', "worker[1].bootstrap"),
        (WORKER + "port = 1", "port"),
        (WORKER + WORKER, "twice"),
        (WORKER + "max_concurrent_requests = 0", "max_concurrent_requests"),
        (WORKER + '[policy.slo]\nmax_ttft_ms = "fast"', "max_ttft_ms"),
        (WORKER + "[policy.slow]\nx = 1", "slow"),
        (WORKER.replace("a:1", "me:secret@a:1"), "a user"),
        (WORKER.replace("a:1", "a:1/?x=1"), "a query"),
        (WORKER.replace("a:1", "a b:1"), "blanks"),
        (WORKER.replace("a:1", "a\\r\\nb:1"), "blanks"),
        (WORKER + 'id = "a b"', "id"),
        (WORKER + WORKER + "max_concurrent_requests = 0", "worker[2].max_concurrent_requests = 0"),
        (WORKER.replace('"m"', "3"), "worker[1].model = 3: Expected `str`"),
        (WORKER.replace("both", "router"), "worker[1].role = 'router'"),
        ("x = " + "[" * 60_000, "nested"),
        ('{"workers": ' + "[" * 100_000, "ClusterView"),
        ('{"workers": [{"id": 7}]}', "workers[1].id = 7"),
        (json_view(url="ftp://x"), "worker[1].url"),
        (json_view(namespace="zz"), "worker[1].namespace"),
        (json_view(twice=True), "twice"),
        (json_view(spec={"prefill_tflops": "fast"}), "prefill_tflops"),
    ],
)
def test_a_fault_is_named(tmp_path, text, named):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert named in str(caught.value)


def test_no_file(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_static(str(tmp_path / "none.toml"))
