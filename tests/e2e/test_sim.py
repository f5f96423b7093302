"""`clusterctl up --engine sim`: an OpenAI request through the real cluster gives the oracle's tokens."""

import grpc
from tokenizers import Tokenizer

from tandem.engine.sim.arithmetic import expected_tokens
from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc
from tests.cluster_fixture import cluster_fixture
from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster
from tools.waiting import wait_for

PROMPT = [(7 * k) % 3000 + 600 for k in range(150)]
ORACLE = expected_tokens(PROMPT, 30, 4096, eos_token_ids=(1,))


cluster = cluster_fixture(
    "--engine", "sim", "--prefill", "2", "--decode", "2", "--disaggregation", "always", "--model", str(MODEL)
)


def test_completions(cluster: Cluster) -> None:
    for _ in range(4):  # cold, then over cached and half cached blocks of whichever workers are chosen
        answer = cluster.complete(PROMPT, 30)
        assert answer["choices"][0]["text"] == Tokenizer.from_file(str(MODEL / "tokenizer.json")).decode(ORACLE)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 30
    received = "tandem_kv_transfer_blocks_total"  # reported with a later load report
    wait_for(lambda: cluster.metric(received, direction="received") > 0, what="blocks have crossed")


def test_grpc_tokens(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.context["grpc"]) as channel:
        request = i.GenerateRequest(
            model="tandem-tiny",
            token_ids=i.TokenIds(ids=PROMPT),
            sampling=i.GenerateSampling(max_tokens=30, temperature=0),
        )
        responses = list(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60))
    assert [token for response in responses for delta in response.choices for token in delta.token_ids] == ORACLE
