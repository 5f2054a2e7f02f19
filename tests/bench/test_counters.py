"""Reading what servers and the kernel count."""

from e2e.bench.processes import cpu_between, read_pss, role_of
from e2e.bench.sockets import Sockets, bytes_between, read_sockets
from foveal_runtime.bench.runs import hit_rates, read_hits

METRICS = """
# TYPE vllm:mm_cache_queries_total counter
vllm:mm_cache_queries_total{engine="0"} 10
vllm:mm_cache_queries_total{engine="1"} 6
# TYPE vllm:mm_cache_hits_total counter
vllm:mm_cache_hits_total{engine="0"} 3
vllm:mm_cache_hits_total{engine="1"} 1
# TYPE foveal_cache_queries counter
foveal_cache_queries_total{cache="encoder"} 8
foveal_cache_queries_total{cache="ipc"} 2
# TYPE foveal_cache_hits counter
foveal_cache_hits_total{cache="encoder"} 4
foveal_cache_hits_total{cache="ipc"} 2
"""


def test_hits_are_summed_over_engines():
    assert read_hits(METRICS) == {"media": (4, 16), "ipc": (2, 2), "encoder": (4, 8)} | {
        "processor": (0, 0)
    }
    assert read_hits("") == {}


def test_rates_are_those_in_between():
    before = {"media": (1.0, 2.0), "ipc": (5.0, 5.0)}
    after = {"media": (4.0, 6.0), "ipc": (5.0, 5.0), "encoder": (1.0, 4.0)}
    assert hit_rates(before, after) == {"media": 0.75, "encoder": 0.25}


def test_bytes_of_frontends_connections_to_engines_only():
    line = '0 0 127.0.0.1:{} 127.0.0.1:{} users:(("python",pid={},fd=9)) bytes_sent:{} rtt:1/2 '
    text = "\n".join(
        (
            line.format(5000, 700, 11, 100) + "bytes_received:23",
            line.format(5001, 701, 11, 7),  # not an engine's port
            line.format(700, 5000, 12, 23) + "bytes_received:100",  # the other end
        )
    )
    assert read_sockets(text, {11}, {700}) == {(5000, 700): 123}


def test_new_connections_do_not_count():
    before, after = Sockets({(1, 2): 10}), Sockets({(1, 2): 15, (3, 2): 99})
    assert bytes_between(before, after) == 5
    assert bytes_between(None, after) is None


def test_roles_of_processes():
    def foveal(role):
        return ["python", "-m", "foveal_runtime.main.cli", role, "--config", "x.json"]

    assert role_of(foveal("engine")) == "engine"
    assert role_of(foveal("frontend")) == "frontend"
    assert role_of(["VLLM::EngineCore"]) == "engine core"
    assert role_of(["/usr/bin/thing"]) == "thing"
    assert role_of([]) == "other"


def test_cpu_of_equal_roles_is_added_up():
    before = {(1, "engine"): 1.0}
    after = {(1, "engine"): 3.0, (2, "engine"): 0.5, (3, "frontend"): 1.0}
    assert cpu_between(before, after) == {"engine": 2.5, "frontend": 1.0}


def test_pss_is_read_from_the_rollup():
    assert (
        read_pss("55-7f ---p 00:00 0 [rollup]\nRss: 900 kB\nPss:  12 kB\nPss_Anon: 3 kB\n") == 12288
    )
    assert read_pss("") == 0
